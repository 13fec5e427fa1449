"""Helpers of the capture's tests: a prompts file, a connection, and one call that captures it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import generate
from eaglet import program
from eaglet.capture import Capture, Captured, Tuning
from eaglet.client import Client, Expected
from eaglet.digests import sample_id
from eaglet.journal import Generations
from eaglet.row_request import Requests
from eaglet.turn_format import TurnFormat

SETTINGS = {"temperature": 0.7, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "max_new_tokens": 64, "seed": 0}
FAST = Tuning(max_in_flight=8, request_timeout=5, give_up_after=5, start_timeout=5, render_samples=4)
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": {"type": "object"}},
}


@dataclass
class Url:
    """A connection to an address, with nothing around it."""

    url: str
    headers: dict = field(default_factory=dict)
    lives: bool = True

    def alive(self) -> bool:
        return self.lives

    def describe(self) -> str:
        return f"the server at {self.url}"


def write_prompts(path: Path, count: int, *, tools: bool = True) -> Path:
    """`count` conversations; every third with a tool, every fifth with a system message."""
    with open(path, "w", encoding="utf-8") as stream:
        for number in range(count):
            messages = [{"role": "user", "content": f"Question {number}: what is the capital of France?"}]
            if number % 5 == 0:
                messages.insert(0, {"role": "system", "content": "Answer with one word."})
            offered = [TOOL] if tools and number % 3 == 0 else None
            record = {"sample_id": sample_id(messages, offered, {}), "messages": messages, "tools": offered}
            stream.write(json.dumps({**record, "template_arguments": {}, "source": {}}) + "\n")
    return path


def client_of(url: str | Url, turn_format: TurnFormat, tuning: Tuning = FAST) -> Client:
    return Client(
        Url(url) if isinstance(url, str) else url,
        Expected(turn_format.vocab_size, frozenset(turn_format.end_of_turn_ids)),
        max_in_flight=tuning.max_in_flight,
        request_timeout=tuning.request_timeout,
        give_up_after=tuning.give_up_after,
    )


def capture(
    folder: Path,
    prompts: Path,
    turn_format: TurnFormat,
    url: str | Url | None,
    *,
    dataset: str = "d",
    max_tokens: int | None = None,
    tuning: Tuning = FAST,
    settings: dict = SETTINGS,
    context_length: int | None = None,
    **more,
) -> tuple[Path, Captured]:
    """Capture `prompts` into folder/{dataset}.parquet with journals in folder/generations; without `url` none may be needed."""
    output = folder / f"{dataset}.parquet"

    def open_client() -> Client:
        assert url is not None, "the capture wants a server"
        return client_of(url, turn_format, tuning)

    with Generations(folder / "generations", dataset) as generations:
        made = Capture(
            prompts=prompts,
            turn_format=turn_format,
            requests=Requests(turn_format, settings, context_length),
            max_tokens=max_tokens,
            generations=generations,
            open_client=open_client,
            tuning=tuning,
            **more,
        ).run(output, dataset, {"dataset": dataset})
    return output, made


def run_generate(arguments: list[str]) -> None:
    """scripts/generate.py in this process, to its end."""
    program.run(lambda _: generate.main(arguments))
