"""Stage evaluate: speculative decoding of the held-out prompts, its acceptance and speed, and proof that the output holds.

Each held-out prompt is decoded greedily with the trained drafter.  Its output must be what the target writes without one:
each token must be the target's most likely one by a pass over the whole sequence, and for `speed_rows` rows of each
dataset the target also decodes alone, in the same process, which must give the same tokens and gives the speed to
compare with.  An untrained drafter (the same sizes and seed) and prompt lookup are measured on the same outputs.

acceptance.json, acceptance.csv and the plots made from them depend on the inputs alone; speed.json and speed.png hold
what was measured on this machine, this time.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eaglet import evaluation_plots, program
from eaglet.acceptance import Acceptance, by_region, regions_of
from eaglet.digests import row_seed
from eaglet.drafter_files import CONFIG, LOG, WEIGHTS, load_drafter
from eaglet.eagle3 import Eagle3Drafter, initial_drafter
from eaglet.errors import EvaluationFailed
from eaglet.files import write_json, write_text
from eaglet.progress import progress
from eaglet.proposers import EagleChain, EagleTree, PromptLookup
from eaglet.provenance import recorded
from eaglet.records import iter_rows
from eaglet.served_evaluation import measure_served
from eaglet.speculative import Decoded, Greedy, NoDraft, Proposer, Sampling, TargetDecoder, decode, replay
from eaglet.token_sampling import SamplingParams
from eaglet.turn_format import TurnFormat

# Two kernels may round a sum differently; a larger difference of logits, relative to the largest, is no rounding.
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
WARM_UP = 4  # tokens decoded before anything is timed


@dataclass
class Measured:
    """One held-out row, decoded."""

    sample_id: str
    dataset: str
    drafted: Decoded
    regions: list[str]
    plain: Decoded | None
    differences: list[dict] = field(default_factory=list)
    baselines: dict[str, list] = field(default_factory=dict)  # drafter -> rounds
    sampled: Decoded | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    output, drafter = Path(options.output), Path(options.drafter)
    files = {
        name: output / name for name in ("acceptance.json", "acceptance.csv", "speed.json", *evaluation_plots.NAMES)
    }
    with recorded(
        options.provenance,
        stage="evaluate",
        name=Path(options.provenance or "evaluate").stem,  # the drafter of a share of the rows is a job of its own
        params=options.params,
        inputs={
            "drafter": [path for name in (CONFIG, WEIGHTS, LOG) if (path := drafter / name).is_file()],
            "manifest": options.manifest,
            "shards": options.shards,
            "turn_format": options.turn_format,
        },
        outputs={name.replace(".", "_"): path for name, path in files.items()},
    ) as job:
        rows, turn_format = heldout_rows(options.shards), TurnFormat.load(options.turn_format)
        if options.server.get("engine") == "sglang":
            log = drafter.parent / "logs" / "evaluate.sglang.log"
            log.parent.mkdir(exist_ok=True)
            server = {**options.server, **options.server_tuning}
            report, speed = measure_served(rows, drafter, options.turn_format, options.params, server, log)
        else:
            measured, machine = measure(rows, drafter, turn_format, options.params)
            report, speed = acceptance_report(measured, options.params), speed_report(measured, machine)
        write_json(files["acceptance.json"], report)
        write_text(files["acceptance.csv"], acceptance_csv(report))
        write_json(files["speed.json"], speed)
        evaluation_plots.draw(output, report, speed, training_log(drafter))
        job.count(len(rows), len(rows))
        job.facts.update(speed=speed)
        tell(report, speed)
        refuse_changed_output(report["identical"].get("failures", []))
        refuse_below_gate(report, options.params.get("min_acceptance"))


def _parser():
    parser = program.parser(__doc__, params="the config's evaluation section, and `seed`, the drafter's")
    parser.add_argument("--drafter", required=True, help="drafter/, with config.json and model.safetensors")
    parser.add_argument("--manifest", required=True, help="shards/manifest.json")
    parser.add_argument("--shards", required=True, nargs="+", help="shards/shard-K.parquet, all of them")
    parser.add_argument("--turn-format", required=True, help="target/turn_format.json")
    program.add_server_options(parser)
    parser.add_argument("--output", required=True, help="evaluation/, the folder to write")
    return parser


def heldout_rows(shards: Iterable[str]) -> list[dict]:
    """The held-out rows of all shards, by dataset and sample_id.  Raises EvaluationFailed where there are none."""
    columns = ["sample_id", "prompt_ids", "dataset", "split"]
    rows = [row for shard in shards for row in iter_rows(shard, "shard", columns) if row["split"] == "heldout"]
    if not rows:
        raise EvaluationFailed(
            "no row of the shards is held out, so there is nothing to evaluate on; set heldout.rows_per_dataset to 1 or more"
        )
    return sorted(rows, key=lambda row: (row["dataset"], row["sample_id"]))


def measure(rows: Sequence[dict], folder: Path, turn_format: TurnFormat, params: dict) -> tuple[list[Measured], dict]:
    """Decode every row; returns the results and a description of the machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = turn_format.target.load(device)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    drafter = load_drafter(folder, embedding, dtype=embedding.dtype)
    baselines: dict[str, Proposer] = {
        "untrained": EagleChain(untrained(drafter, embedding, head, params["seed"])),
        "prompt_lookup": PromptLookup(),
    }
    proposer = EagleChain(drafter)
    if tree := params.get("tree"):
        baselines["chain"] = proposer
        proposer = EagleTree(drafter, branches=tree["branches"], tokens=tree["tokens"])
    target = TargetDecoder(model, drafter.config.layer_ids)
    evaluator = Evaluator(target, proposer, baselines, turn_format, params)
    evaluator.warm_up(rows[0]["prompt_ids"])
    done: list[Measured] = []
    for row in progress(rows, what="decode held-out prompts"):
        alone = sum(m.dataset == row["dataset"] for m in done) < (params.get("speed_rows") or len(rows))
        done.append(evaluator.measure(row, also_plain=alone))
    target.close()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    dtype = str(embedding.dtype).removeprefix("torch.")
    return done, {"where": f"{name}, {dtype}, {torch.get_num_threads()} threads"}


def untrained(drafter: Eagle3Drafter, embedding: torch.Tensor, head: torch.Tensor, seed: int) -> Eagle3Drafter:
    """The drafter as it was before training: the same sizes, draft vocabulary and seed."""
    target_ids = drafter.t2d.nonzero().squeeze(-1).cpu()
    made = initial_drafter(drafter.config, embedding.cpu(), head.cpu(), target_ids, seed)
    return made.to(embedding.device, embedding.dtype).eval()


class Evaluator:
    """Decodes rows of one target with one drafter, and replays baselines on the outputs."""

    def __init__(
        self,
        target: TargetDecoder,
        proposer: Proposer,
        baselines: dict[str, Proposer],
        turn_format: TurnFormat,
        params: dict,
    ):
        self.target, self.proposer, self.baselines, self.turn_format = target, proposer, baselines, turn_format
        self.max_new_tokens, self.draft_tokens = params["max_new_tokens"], params["draft_tokens"]
        self.sampling = SamplingParams(temperature=params.get("temperature", 0), top_p=params.get("top_p", 1))
        self.seed = params["seed"]

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        for proposer in (self.proposer, NoDraft()):
            self._decode(proposer, prompt_ids, WARM_UP)

    def measure(self, row: dict, *, also_plain: bool) -> Measured:
        prompt_ids = row["prompt_ids"]
        limit = min(self.max_new_tokens, self.turn_format.context_length - len(prompt_ids))
        drafted = self._decode(self.proposer, prompt_ids, limit)
        plain = self._decode(NoDraft(), prompt_ids, limit) if also_plain else None
        regions = regions_of(drafted.output_ids, self.turn_format)
        logits, aux = self._reread(prompt_ids, drafted.output_ids)
        measured = Measured(row["sample_id"], row["dataset"], drafted, regions, plain)
        measured.differences = [
            {"sample_id": row["sample_id"], "dataset": row["dataset"], **difference}
            for difference in differences(logits, drafted.output_ids, plain.output_ids if plain else None)
        ]
        for name, proposer in self.baselines.items():
            measured.baselines[name] = replay(
                proposer, prompt_ids, drafted.output_ids, aux, max_new_tokens=limit, draft_tokens=self.draft_tokens
            )
        if not self.sampling.greedy:
            rule = Sampling(self.sampling, row_seed(self.seed, row["sample_id"]))
            measured.sampled = self._decode(self.proposer, prompt_ids, limit, rule)
        return measured

    def _decode(
        self, proposer: Proposer, prompt_ids: Sequence[int], limit: int, rule: Greedy | Sampling | None = None
    ) -> Decoded:
        return decode(
            self.target,
            proposer,
            prompt_ids,
            max_new_tokens=limit,
            draft_tokens=self.draft_tokens,
            stop_ids=self.turn_format.end_of_turn_ids,
            rule=rule,
        )

    @torch.inference_mode()
    def _reread(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [len(output_ids), V] that predict each output token, aux [all tokens, 3H]), from one pass."""
        hidden = self.target.read_all([*prompt_ids, *output_ids])
        return self.target.head(hidden[len(prompt_ids) - 1 : -1]), self.target.aux()


def differences(logits: torch.Tensor, output_ids: Sequence[int], plain_ids: Sequence[int] | None) -> list[dict]:
    """Places where the drafted output is not the target's own, each judged by the logits of one pass over the output.

    logits [n, V] predict the n tokens of `output_ids`.  A token that is not the most likely one is a near tie if it lies
    within the rounding of the most likely one's logit, else a failure; so is a first difference from `plain_ids`.
    """
    noise = ROUNDING[logits.dtype] * logits.abs().amax().item()
    best = logits.argmax(-1).tolist()
    places = {i: best[i] for i, token in enumerate(output_ids) if token != best[i]}
    if plain_ids is not None and list(plain_ids) != list(output_ids):
        shared = min(len(plain_ids), len(output_ids))
        first = next((i for i in range(shared) if plain_ids[i] != output_ids[i]), None)
        if first is None:  # one output goes on where the other ended
            return [{"kind": "failure", "position": shared, "lengths": [len(output_ids), len(plain_ids)]}]
        places[first] = plain_ids[first]
    found = []
    for place, other in sorted(places.items()):
        pair = [output_ids[place], other]
        values = [logits[place, token].item() for token in pair]
        near = max(logits[place].amax().item() - value for value in values) <= noise
        kind = "near_tie" if near else "failure"
        found.append({"kind": kind, "position": place, "tokens": pair, "logits": [round(v, 5) for v in values]})
    return found


def acceptance_report(rows: Sequence[Measured], params: dict) -> dict:
    """acceptance.json: the overall figures first, then baselines, datasets and regions, then the proof."""
    compared = [m for m in rows if m.plain is not None]
    return {
        "draft_tokens": params["draft_tokens"],
        "tree": params.get("tree"),
        "max_new_tokens": params["max_new_tokens"],
        "temperature": 0,
        "rows": len(rows),
        "output_tokens": sum(len(m.drafted.output_ids) for m in rows),
        **_total(m.drafted.rounds for m in rows),
        "baselines": {name: _total(m.baselines[name] for m in rows) for name in rows[0].baselines},
        "sampled": _sampled(rows, params),
        "regions": _by_region(rows),
        "datasets": {
            dataset: {
                "rows": len(group),
                **_total(m.drafted.rounds for m in group),
                "baselines": {name: _total(m.baselines[name] for m in group) for name in group[0].baselines},
                "regions": _by_region(group),
            }
            for dataset, group in _by_dataset(rows).items()
        },
        "identical": {
            "rows_decoded_without_drafter": len(compared),
            "tokens_decoded_without_drafter": sum(len(m.plain.output_ids) for m in compared),
            "rows_checked_by_one_pass": len(rows),
            "tokens_checked_by_one_pass": sum(len(m.drafted.output_ids) for m in rows),
            "near_ties": [d for m in rows for d in m.differences if d["kind"] == "near_tie"],
            "failures": [d for m in rows for d in m.differences if d["kind"] == "failure"],
        },
        "min_acceptance": params.get("min_acceptance"),
    }


def _total(rounds: Iterable[list]) -> dict:
    counted = Acceptance()
    for some in rounds:
        counted.add(some)
    return counted.as_json()


def _sampled(rows: Sequence[Measured], params: dict) -> dict | None:
    """The same figures when sampling; None where it was not asked for."""
    rounds = [m.sampled.rounds for m in rows if m.sampled is not None]
    return {"temperature": params["temperature"], "top_p": params["top_p"], **_total(rounds)} if rounds else None


def _by_dataset(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    return {dataset: [m for m in rows if m.dataset == dataset] for dataset in sorted({m.dataset for m in rows})}


def _by_region(rows: Sequence[Measured]) -> dict[str, dict]:
    found: dict[str, Acceptance] = {}
    for m in rows:
        for region, rounds in by_region(m.drafted.rounds, m.regions).items():
            found.setdefault(region, Acceptance()).add(rounds)
    return {region: counted.as_json() for region, counted in sorted(found.items())}


def acceptance_csv(report: dict) -> str:
    """The same figures as a table: a line for each drafter, dataset and region."""
    text = io.StringIO()
    shares = [f"share_{i + 1}" for i in range(report["draft_tokens"])]
    columns = ["drafter", "dataset", "region", "acceptance_length", "verifications", "tokens", *shares]
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for dataset, figures in report["datasets"].items():
        parts = [("trained", "all", figures)]
        parts += [("trained", region, part) for region, part in figures["regions"].items()]
        parts += [(name, "all", part) for name, part in figures["baselines"].items()]
        for drafter, region, part in parts:
            named = dict(zip(shares, part["accepted_share"], strict=False))
            writer.writerow({"drafter": drafter, "dataset": dataset, "region": region, **part, **named})
    return text.getvalue()


def speed_report(rows: Sequence[Measured], machine: dict) -> dict:
    """speed.json: tokens per second with and without the drafter, on the rows that were decoded both ways."""

    def pace(decoded: Sequence[Decoded]) -> dict:
        tokens, seconds = sum(len(d.output_ids) - 1 for d in decoded), sum(d.seconds for d in decoded)
        rate = round(tokens / seconds, 2) if tokens else None
        return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": rate}

    def compare(group: Sequence[Measured]) -> dict:
        drafted, plain = pace([m.drafted for m in group]), pace([m.plain for m in group])
        rates = drafted["tokens_per_second"], plain["tokens_per_second"]
        speedup = round(rates[0] / rates[1], 3) if None not in rates else None
        return {"rows": len(group), "speedup": speedup, "with_drafter": drafted, "without_drafter": plain}

    both = [m for m in rows if m.plain is not None and len(m.plain.output_ids) > 1]
    groups = _by_dataset(both)
    return {
        **machine,
        "batch_size": 1,
        **compare(both),
        "datasets": {name: compare(group) for name, group in groups.items()},
    }


def training_log(drafter: Path) -> list[dict]:
    """The lines of drafter/log.jsonl; none where the drafter was not trained here."""
    log = drafter / LOG
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


def tell(report: dict, speed: dict) -> None:
    """The figures for people, on stdout."""
    for dataset, figures in report["datasets"].items():
        shares = " ".join(f"{share:.2f}" for share in figures["accepted_share"])
        print(f"{dataset}: acceptance length {figures['acceptance_length']}, accepted share by position {shares}")
    others = ", ".join(f"{name} {figures['acceptance_length']}" for name, figures in report["baselines"].items())
    print(f"all: acceptance length {report['acceptance_length']} ({others})")
    if sampled := report["sampled"]:
        print(f"sampling at temperature {sampled['temperature']}: acceptance length {sampled['acceptance_length']}")
    for name, figures in {"one at once": speed, **speed.get("batches", {})}.items():
        rates = [figures[way]["tokens_per_second"] for way in ("with_drafter", "without_drafter")]
        print(
            f"{name}: {rates[0]} tokens/s with the drafter, {rates[1]} without ({figures['speedup']}×; {speed['where']})"
        )


def refuse_changed_output(failures: Sequence[dict]) -> None:
    """Raise EvaluationFailed where the drafter changed a token by more than rounding."""
    if failures:
        first = failures[0]
        detail = (
            f"tokens {first['tokens'][0]} with and {first['tokens'][1]} without the drafter, logits {first['logits']}"
            if "tokens" in first
            else f"the outputs have {first['lengths'][0]} and {first['lengths'][1]} tokens"
        )
        raise EvaluationFailed(
            f"the drafter changed the greedy output at {len(failures)} places; the first: row {first['sample_id']} "
            f"({first['dataset']}), output position {first['position']}: {detail}. This is a fault in decoding, not in the drafter's "
            "quality: please report it with this message"
        )


def refuse_below_gate(report: dict, gate: float | None) -> None:
    """Raise EvaluationFailed where the acceptance length is below `evaluation.min_acceptance`."""
    if gate is not None and (report["acceptance_length"] or 0) < gate:
        raise EvaluationFailed(
            f"acceptance length {report['acceptance_length']} is below evaluation.min_acceptance {gate}; train longer (drafter.epochs), "
            "on more rows, or lower the gate"
        )


if __name__ == "__main__":
    program.run(main)
