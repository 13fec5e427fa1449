"""The target's forward pass as a drafter sees it: three auxiliary layers and the last one, for every token.

Layer k means transformers' `hidden_states[k]`: the *input* of decoder layer k (SpecForge's configs name outputs, one
less).  `last` is what the decoder returns, after its final norm, so that logits = lm_head(last).  Only the wanted layers
are caught, by hooks, and no logits are computed.  This module knows nothing about files, prompts or drafters.

Rows are padded on the right and need no mask: in a causal model no token sees what follows it.  How many rows share a
pass can change the last bits of a matrix product.  On a CPU, where one row fills the cores, each row therefore has
its own pass and its states depend on nothing else; on a GPU passes are filled up to a token budget.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from eaglet.errors import ConfigError, TargetError
from eaglet.targets import Target

GPU_BATCH_TOKENS = 16384


def auxiliary_layers(num_layers: int, wanted: str | Sequence[int] = "auto") -> list[int]:
    """The three layers to catch, ascending: `auto` is [2, N//2, N−3] (EAGLE-3's choice).  Raises ConfigError."""
    layers = [2, num_layers // 2, num_layers - 3] if wanted == "auto" else list(wanted)
    if len(layers) != 3 or sorted(set(layers)) != layers or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(
            f"hidden_states.layers: {wanted} gives {layers}; expected three ascending numbers from 0 to {num_layers - 1} "
            f"(the target has {num_layers} layers; k is the input of layer k)"
        )
    return layers


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The stack of decoder layers with its final norm, inside a causal or a multimodal model.  Raises TargetError."""
    decoder = model.get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    if not hasattr(decoder, "layers"):
        raise TargetError(
            f"{type(model).__name__}: its decoder {type(decoder).__name__} has no `layers` to catch hidden states from; "
            "use hidden_states.backend: sglang"
        )
    return decoder


class LayerTap:
    """Catches the inputs of chosen decoder layers during the model's forward passes, until it is closed."""

    def __init__(self, decoder: torch.nn.Module, layers: Sequence[int]):
        self._caught: dict[int, torch.Tensor] = {}
        self._layers = list(layers)
        self._hooks = [
            decoder.layers[k].register_forward_pre_hook(self._catch(k), with_kwargs=True) for k in self._layers
        ]

    def _catch(self, layer: int):
        def hook(module: torch.nn.Module, arguments: tuple, named: dict) -> None:
            self._caught[layer] = arguments[0] if arguments else named["hidden_states"]

        return hook

    def aux(self) -> torch.Tensor:
        """[..., 3H] of the last pass: the layers side by side, lowest first."""
        return torch.cat([self._caught[k] for k in self._layers], dim=-1)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups of row numbers, longest rows first, each of at most `batch_tokens` tokens after padding (or one row)."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


class HiddenForward:
    """The target loaded for capturing hidden states.

    `layers` as `auxiliary_layers` gives them; `batch_tokens` None: one row a pass on a CPU, `GPU_BATCH_TOKENS` on a GPU.
    """

    def __init__(self, target: Target, layers: Sequence[int], *, batch_tokens: int | None = None):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch_tokens = batch_tokens or (1 if self.device == "cpu" else GPU_BATCH_TOKENS)
        self.model = target.load(self.device)
        self.layers = list(layers)
        self.decoder, self.head = decoder_of(self.model), self.model.get_output_embeddings()
        self._tap = LayerTap(self.decoder, self.layers)

    @torch.inference_mode()
    def states(self, rows: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(aux [T, 3H], last [T, H]) of each row of token ids, from one pass, on the model's device and in its dtype."""
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)  # [B, T]
        last = self.decoder(input_ids=padded, use_cache=False).last_hidden_state  # [B, T, H]
        aux = self._tap.aux()  # [B, T, 3H]
        return [(aux[i, : len(row)], last[i, : len(row)]) for i, row in enumerate(rows)]

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, torch.Tensor, torch.Tensor]]]:
        """The states of all rows, pass by pass, longest rows first: lists of (row number, aux, last)."""
        for batch in plan_batches([len(row) for row in rows], self.batch_tokens):
            states = self.states([rows[i] for i in batch])
            yield [(i, aux, last) for i, (aux, last) in zip(batch, states, strict=True)]

    @torch.inference_mode()
    def check(self, token_ids: Sequence[int]) -> float:
        """Compare the hooks with what the model itself reports for one row.  Raises TargetError where they differ.

        Covers a wrapper that changes hidden states between decoder and head, and layers in another order.  Returns the tokens per
        second of a pass as large as those to come.
        """
        ids = torch.tensor([list(token_ids)], device=self.device)
        own = self.model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        rows = [token_ids] * max(1, self.batch_tokens // len(token_ids))
        begun = self._now()
        aux, last = self.states(rows)[0]
        pace = len(rows) * len(token_ids) / (self._now() - begun)
        wanted = torch.cat([own.hidden_states[k][0] for k in self.layers], dim=-1)
        logits = self.head(last[-1:])
        for what, found, expected in [("aux", aux, wanted), ("lm_head(last)", logits, own.logits[0])]:
            off = (found.float() - expected.float()).abs().max().item()
            scale = expected.float().abs().max().item()
            if off > 0.02 * scale:
                raise TargetError(
                    f"{type(self.model).__name__}: {what} differs from the model's own by {off:.3g} (values up to {scale:.3g}); "
                    "this architecture treats hidden states in a way that the transformers backend does not know; "
                    "use hidden_states.backend: sglang"
                )
        return pace

    def _now(self) -> float:
        """Seconds, once the device has done what it was asked."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def close(self) -> None:
        self._tap.close()
