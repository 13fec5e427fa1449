"""A generation engine for the CPU: continuous batching over one transformers model, token ids in, token ids out.

The engine knows nothing of text, chat templates or HTTP.  Requests come from any thread; one thread runs the model.  A
prompt is read by itself (one forward pass without padding), then its row joins the batch that writes one token per row
and step; a finished row leaves at once and the next request takes its place.  Against static batches this wins twice:
no step is spent on rows that have ended, and no token on padding.

Rows do not influence each other: a prompt is never batched with another, padding rows keep the shapes of the
step's matrix products in a range where the CPU's kernels compute a row the same way whatever stands beside it, and each
request draws from a generator of its own.  So a request's tokens are the same alone and in company, up to what
the kernels guarantee.
"""

import inspect
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eaglet.errors import TargetError
from eaglet.token_sampling import SamplingParams, next_tokens

ATTENTION = "eaglet_rows"
# With fewer rows BLAS takes other kernels (matrix-vector, narrow tiles) that round differently, so a row's tokens would
# depend on how many others there are.
LEAST_ROWS = 16
SPAN_STEP = 16  # attention over a span that is no multiple of the vector length sums its end in another order
WIDTH_STEP = 128  # the cache grows in steps of so many positions
REPORT_SECONDS = 10.0

log = logging.getLogger("eaglet.engine")


class RequestRefused(ValueError):
    """The request can never be served; the message says why."""


class QueueFull(RuntimeError):
    """Too many requests wait already."""


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.  Wait for `done`; then `finish_reason` or `error` is set.

    `finish_reason` is SGLang's: {"type": "stop", "matched": id}, {"type": "length", "length": n}, or {"type": "abort", …}.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    aborted: bool = False
    limit: int = 0  # the most output tokens, once the engine has accepted it
    generator: torch.Generator | None = None

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def draw(self) -> float:
        """The request's next random number in [0, 1): one for each output token, in order."""
        return 0.0 if self.generator is None else float(torch.rand((), generator=self.generator, dtype=torch.float64))


class RowCache:
    """Keys and values of the rows of the batch: per layer one tensor [rows, key/value heads, width, head size].

    Speaks the part of transformers' cache interface that a decoder calls.  `reading` and `writing` say what the next forward
    pass is: one prompt into one row, or one token for each of the first n rows.
    """

    is_compileable = False

    def __init__(self, layers: int, budget: int):
        self.budget = budget  # most rows × width
        self.width = 0
        self.rows = 0
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self._row: int | None = None
        self._positions: Tensor | None = None
        self._all_rows: Tensor | None = None
        self.span = 0  # positions that the queries of a writing pass look at

    def reserve(self, used: int, rows: int, width: int) -> None:
        """Make room for `rows` of `width` positions; the content of the first `used` rows stays."""
        self.rows, self.width = rows, width
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is not None:
                    # Zeros, since what a masked position holds is multiplied by 0, and 0 × NaN is NaN.
                    new = old.new_zeros(rows, old.shape[1], width, old.shape[3])
                    both = min(width, old.shape[2])
                    new[:used, :, :both] = old[:used, :, :both]
                    store[layer] = new

    def reading(self, row: int) -> None:
        """The next pass reads a prompt into `row`."""
        self._row, self._positions = row, None

    def writing(self, positions: Tensor) -> None:
        """The next pass adds one token at `positions[i]` of row i."""
        self._row, self._positions = None, positions
        self._all_rows = torch.arange(len(positions))
        self.span = _round_up(int(positions.max()) + 1, SPAN_STEP)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [batch, heads, tokens, head size]; return those that the queries may look at."""
        if self.keys[layer_idx] is None:
            self.keys[layer_idx] = key.new_zeros(self.rows, key.shape[1], self.width, key.shape[3])
            self.values[layer_idx] = value.new_zeros(self.rows, value.shape[1], self.width, value.shape[3])
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._row is not None:
            keys[self._row, :, : key.shape[2]] = key[0]
            values[self._row, :, : value.shape[2]] = value[0]
            return key, value
        rows, positions = self._all_rows, self._positions
        keys[rows, :, positions] = key[:, :, 0]
        values[rows, :, positions] = value[:, :, 0]
        return keys[: len(rows), :, : self.span], values[: len(rows), :, : self.span]

    def move(self, source: int, to: int, length: int) -> None:
        """Copy a row's first `length` positions over another row."""
        for store in (self.keys, self.values):
            for layer in store:
                layer[to, :, :length] = layer[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one prompt (causal) or of one new token per row (under `attention_mask`), registered with transformers.

    query [batch, heads, tokens, size], key and value [batch, key/value heads, span, size], mask [batch, 1, 1, span], added to
    the scores.  With one query the heads that share keys become the query axis, so nothing is repeated.
    """
    batch, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    if tokens == 1 and attention_mask is not None:
        packed = query.reshape(batch, key.shape[1], groups, size)
        out = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = scaled_dot_product_attention(query, key, value, is_causal=tokens > 1, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, row_attention)


@dataclass
class Statistics:
    """What the engine has done since it started, and its speed over the last report."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    steps: int = 0
    tokens_per_second: float = 0.0


class Engine:
    """Runs a causal language model for many requests.  `start()`, `submit()` from any thread, `stop()`.

    `end_ids` end a row unless the request ignores them.  `cache_bytes` bounds keys and values; requests beyond it wait.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_ids: Iterable[int],
        context_length: int,
        max_running: int = 32,
        max_queued: int = 4096,
        cache_bytes: int = 1 << 30,
        seed: int = 0,
    ):
        text = model.config.get_text_config()
        self.model = model
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.end_ids = frozenset(end_ids)
        self.max_running, self.max_queued = max_running, max_queued
        self.max_total_tokens = max(_round_up(1, WIDTH_STEP), cache_bytes // _bytes_per_token(model))
        self.context_length = min(context_length, self.max_total_tokens)
        self.statistics = Statistics()
        self.last_progress = time.monotonic()
        self._cache = RowCache(text.num_hidden_layers, self.max_total_tokens)
        self._rows: list[Request] = []
        self._queue: deque[Request] = deque()
        self._changed = threading.Condition()
        # transformers 5 renamed the argument; models with code of their own may have either.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._seeds = itertools.count(seed)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        model.set_attn_implementation(ATTENTION)
        self._check_attention()

    # ---- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the engine's thread; requests that are not finished are aborted."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def healthy(self, patience: float) -> bool:
        """The thread lives, and has made progress within `patience` seconds if there is work."""
        idle = not self._rows and not self._queue
        return self._thread.is_alive() and (idle or time.monotonic() - self.last_progress < patience)

    def submit(self, request: Request) -> None:
        """Put a request into the queue.  Raises RequestRefused or QueueFull."""
        self._accept(request)
        with self._changed:
            if self._stopping:
                raise QueueFull("the engine is stopping")
            if len(self._queue) >= self.max_queued:
                raise QueueFull(f"The request queue is full ({self.max_queued} requests wait).")
            self._queue.append(request)
            self._changed.notify()

    def abort(self, request: Request) -> None:
        """The answer is not wanted any more: the row leaves the batch at the next step."""
        request.aborted = True

    def _accept(self, request: Request) -> None:
        """Check a request and set its limit and generator."""
        prompt, params = request.prompt_ids, request.params
        if not prompt:
            raise RequestRefused("input_ids is empty")
        wrong = next((i for i, token in enumerate(prompt) if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise RequestRefused(
                f"input_ids[{wrong}] is {prompt[wrong]}; the model's vocabulary has the ids 0 to {self.vocab_size - 1}"
            )
        room = self.context_length - len(prompt)
        if room < 1:
            raise RequestRefused(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({self.context_length} tokens)."
            )
        if params.max_new_tokens is not None and params.max_new_tokens > room:
            raise RequestRefused(
                f"Requested token count exceeds the model's maximum context length of {self.context_length} tokens: "
                f"{len(prompt)} tokens in the input and {params.max_new_tokens} for the completion."
            )
        request.limit = room if params.max_new_tokens is None else params.max_new_tokens
        if not params.greedy:
            seed = next(self._seeds) if params.sampling_seed is None else params.sampling_seed
            request.generator = torch.Generator().manual_seed(seed % (1 << 63))

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        reported, tokens = time.monotonic(), 0
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._admit()
                    self._step()
                    now = time.monotonic()
                    if now - reported >= REPORT_SECONDS:
                        self._report(now - reported, self.statistics.output_tokens - tokens)
                        reported, tokens = now, self.statistics.output_tokens
        except BaseException as error:
            log.exception("the engine has failed")
            self._end_all({"type": "abort", "message": "the engine failed", "status_code": 500}, error)
            raise
        self._end_all({"type": "abort", "message": "the engine was stopped", "status_code": 503}, None)

    def _report(self, seconds: float, tokens: int) -> None:
        self.statistics.tokens_per_second = tokens / seconds
        log.info("running %d, waiting %d, %.1f token/s", self.running, self.waiting, tokens / seconds)

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False when the engine stops."""
        with self._changed:
            while not self._rows and not self._queue and not self._stopping:
                self.last_progress = time.monotonic()
                self._changed.wait()
            return not self._stopping

    def _admit(self) -> None:
        """Let waiting requests in while rows and cache have room, in the order of arrival."""
        while self._queue and len(self._rows) < self.max_running:
            request = self._queue[0]
            if not request.aborted and not self._make_room(request):
                return
            with self._changed:
                self._queue.popleft()
            if request.aborted or request.limit == 0:
                self._finish(request)
            else:
                self._read_prompt(request)

    def _make_room(self, request: Request) -> bool:
        """Shape the cache so that `request` gets a row of its full length beside the others; False if it must wait."""
        cache, used = self._cache, len(self._rows)
        needs = [len(r.prompt_ids) + r.limit for r in (*self._rows, request)]
        if used < cache.rows and needs[-1] <= cache.width:
            return True
        width = _round_up(max(needs), WIDTH_STEP)
        if used and (used + 1) * width > cache.budget:
            return False
        rows = min(_round_up(self.max_running, LEAST_ROWS), max(1, cache.budget // width))
        cache.reserve(used, rows, width)
        return True

    def _read_prompt(self, request: Request) -> None:
        """One forward pass over a whole prompt; its row joins the batch with its first token."""
        row = len(self._rows)
        prompt = torch.tensor([list(request.prompt_ids)])
        self._cache.reading(row)
        logits = self._forward(prompt, torch.arange(prompt.shape[1])[None], None)
        self._rows.append(request)
        self.statistics.prompt_tokens += prompt.shape[1]
        self._add_tokens(logits, [row])

    def _step(self) -> None:
        """One token for every row."""
        if not self._rows:
            return
        rows = len(self._rows)
        # The last token of a row is not in the cache yet: it goes to position length − 1.
        padding = min(_round_up(rows, LEAST_ROWS), self._cache.rows) - rows
        positions = torch.tensor([r.length - 1 for r in self._rows] + [0] * padding)
        tokens = torch.tensor([r.output_ids[-1] for r in self._rows] + [0] * padding)
        self._cache.writing(positions)
        logits = self._forward(tokens[:, None], positions[:, None], self._mask(positions))
        self.statistics.steps += 1
        self._add_tokens(logits[:rows], range(rows))

    def _mask(self, positions: Tensor) -> Tensor:
        """Added to the scores [rows, 1, 1, span] of a writing pass: each row sees its own positions only."""
        hidden = torch.arange(self._cache.span)[None, :] > positions[:, None]
        return torch.zeros(hidden.shape, dtype=self.model.dtype).masked_fill_(hidden, -math.inf)[:, None, None, :]

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Logits [batch, vocabulary] after the last of `tokens` [batch, tokens]."""
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            **{self._cache_argument: self._cache},
            use_cache=True,
            logits_to_keep=1,
        )
        self.last_progress = time.monotonic()
        return out.logits[:, -1]

    def _add_tokens(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Choose the next token of the given rows; take the rows that have ended out of the batch."""
        requests = [self._rows[row] for row in rows]
        for place, request in enumerate(requests):
            if len(request.output_ids) < request.params.min_new_tokens:
                logits[place, sorted(self.end_ids | request.params.stop_token_ids)] = -math.inf
        broken = logits.isnan().any(dim=-1).tolist()
        chosen = next_tokens(logits, [r.params for r in requests], [r.draw() for r in requests])
        for request, token, nan in zip(requests, chosen, broken, strict=True):
            request.output_ids.append(token)
            request.finish_reason = self._finish_reason(request, token, nan)
            self.statistics.output_tokens += 1
        for row in sorted(rows, reverse=True):
            if self._rows[row].finish_reason or self._rows[row].aborted:
                self._remove(row)

    def _finish_reason(self, request: Request, token: int, nan: bool) -> dict[str, Any] | None:
        if nan:
            return {"type": "stop", "matched": "NaN happened"}
        ends = (
            request.params.stop_token_ids if request.params.ignore_eos else self.end_ids | request.params.stop_token_ids
        )
        if token in ends:
            return {"type": "stop", "matched": token}
        if len(request.output_ids) >= request.limit:
            return {"type": "length", "length": len(request.output_ids)}
        return None

    def _remove(self, row: int) -> None:
        """Take a row out of the batch; the last row moves into its place, so that rows stay contiguous."""
        request, last = self._rows[row], self._rows.pop()
        if last is not request:
            self._cache.move(len(self._rows), row, last.length)
            self._rows[row] = last
        self._finish(request)

    def _finish(self, request: Request) -> None:
        if request.finish_reason is None:
            if request.aborted:
                request.finish_reason = {"type": "abort", "message": "aborted by the client", "status_code": 499}
            else:
                request.finish_reason = {"type": "length", "length": 0}
        self.statistics.requests += 1
        request.done.set()

    def _end_all(self, reason: dict[str, Any], error: BaseException | None) -> None:
        with self._changed:
            self._stopping = True
            left = [*self._rows, *self._queue]
            self._rows, self._queue = [], deque()
        for request in left:
            request.finish_reason, request.error = reason, error
            request.done.set()

    @torch.inference_mode()
    def _check_attention(self) -> None:
        """Compare a few logits with the model's own attention: an architecture that needs more than plain causal attention
        (sliding windows, caps, sinks, recurrent layers) is refused here instead of answering differently."""
        length, steps = 12, 3
        tokens = torch.randint(self.vocab_size, (1, length + steps), generator=torch.Generator().manual_seed(0))
        try:
            self._cache.reserve(0, LEAST_ROWS, WIDTH_STEP)
            self._cache.reading(0)
            ours = [self._forward(tokens[:, :length], torch.arange(length)[None], None)[0]]
            for position in range(length, length + steps):
                self._cache.writing(torch.full((1,), position))
                mask = self._mask(torch.tensor([position]))
                ours.append(self._forward(tokens[:, position : position + 1], torch.tensor([[position]]), mask)[0])
            self.model.set_attn_implementation("sdpa")
            theirs = self.model(input_ids=tokens, use_cache=False).logits[0, length - 1 :]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise TargetError(_unsupported(self.model, str(error))) from error
        finally:
            self.model.set_attn_implementation(ATTENTION)
        window = getattr(self.model.config.get_text_config(), "sliding_window", None)
        windowed = "sliding_attention" in (getattr(self.model.config.get_text_config(), "layer_types", None) or [])
        if windowed and window and window < self.context_length:
            raise TargetError(_unsupported(self.model, f"its attention slides over {window} positions"))
        error = (torch.stack(ours) - theirs).abs().max() / theirs.abs().max()
        if not error < 20 * torch.finfo(self.model.dtype).eps ** 0.75:
            raise TargetError(_unsupported(self.model, f"its logits differ by {float(error):.1e}"))


def _unsupported(model: PreTrainedModel, why: str) -> str:
    return (
        f"the embedded engine cannot run {type(model).__name__} ({why}); it serves decoders with plain causal "
        "attention. Set server.engine: sglang"
    )


def _bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
