"""Watch a capture from another terminal: rows, tokens, speed, time left, finish reasons, and the server's own figures.

    python scripts/monitor.py --run-dir results/demo
    python scripts/monitor.py --run-dir results/demo --once
    python scripts/monitor.py --run-dir results/kimi --configfile config/kimi-k2.5.yaml --json

Reads files only and asks the server for its state, so it can be started and stopped at any time, also over ssh.  Speed
and time left are those of the last five minutes.  Ctrl-C ends the view and nothing else.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eaglet import program
from eaglet.config import read_config
from eaglet.errors import ConfigError
from eaglet.watch import RunWatch

HEALTH = {
    "none": ("no server yet", "yellow"),
    "starting": ("starting", "yellow"),
    "answers": ("answers", "green"),
    "late": ("answers late; it is busy or stuck", "yellow"),
    "silent": ("does not answer", "red"),
}
STATES = {"no prompts": "dim", "waiting": "yellow", "running": "cyan", "done": "green"}


def duration(seconds: float | None) -> str:
    """`3 d 04 h`, `4 h 05 min`, `5 min 06 s` or `7 s`."""
    if seconds is None:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02} h"
    if hours:
        return f"{hours} h {minute:02} min"
    return f"{minute} min {second:02} s" if minute else f"{second} s"


def count(number: float | None) -> str:
    """`950`, `12.3k`, `10.0M`."""
    if number is None:
        return "?"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{number:.0f}"


def reasons(counted: Mapping[str, int]) -> str:
    return " ".join(f"{name} {rows}" for name, rows in counted.items()) or "-"


def view(seen: Mapping) -> Group:
    """The snapshot of `RunWatch.look` as rich shows it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("dataset")
    table.add_column("state")
    for name in ("rows", "%", "tokens", "cap", "tok/s", "left"):
        table.add_column(name, justify="right")
    table.add_column("finished by")
    table.add_column("set aside")
    for part in seen["datasets"]:
        rows, tokens, state = part["rows"], part["output_tokens"], part["state"]
        settled = rows["done"] + sum(rows["refused"].values())
        table.add_row(
            part["dataset"],
            Text(state, STATES[state]),
            f"{rows['done']}/{'?' if rows['total'] is None else rows['total']}",
            "?" if rows["left"] is None else f"{100 * settled / max(1, settled + rows['left']):.0f}",
            count(tokens["done"]),
            count(tokens["cap"]) if tokens["cap"] else "-",
            f"{part['tokens_per_second']:.0f}" if state == "running" else "-",
            "-" if state == "done" else duration(part["seconds_left"]),
            reasons(part["finish_reasons"]),
            Text(reasons(rows["refused"]), "red" if rows["refused"] and state != "done" else ""),
        )
    total = seen["total"]
    line = (
        f"{total['rows']['done']} of {total['rows']['total']} rows, {count(total['output_tokens'])} tokens, "
        f"{total['tokens_per_second']:.0f} tok/s, {duration(total['seconds_left'])} left"
    )
    parts = [Text(f"{seen['run']}  {seen['time']}", "bold"), server_line(seen["server"]), table, Text(line)]
    damaged = {part["dataset"]: part["damaged_lines"] for part in seen["datasets"] if part["damaged_lines"]}
    if damaged:
        parts.append(Text(f"damaged journal lines: {reasons(damaged)}; generate.py names them", "red"))
    return Group(*parts)


def server_line(server: Mapping) -> Text:
    told, colour = HEALTH[server["health"]]
    more = [f"at {server['url']}"] if server["url"] else []
    if server["tokens_per_second"] is not None:
        more.append(f"{server['tokens_per_second']:.0f} tok/s by its own count")
    more += [f"{server[name]:.0f} {name}" for name in ("running", "queued") if server[name] is not None]
    if server["problem"]:
        more.append(server["problem"])
    return Text.assemble("server ", (told, colour), *(f", {part}" for part in more))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", required=True, type=Path, metavar="FOLDER", help="results/{run}")
    parser.add_argument(
        "--configfile",
        type=Path,
        default=Path("config/config.yaml"),
        metavar="FILE",
        help="the run's (default: %(default)s)",
    )
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="default: store beside the run's folder")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between looks (default: %(default)s)"
    )
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--once", action="store_true", help="one look as plain text")
    once.add_argument("--json", action="store_true", help="one look as JSON")
    arguments = parser.parse_args(argv)
    config = read_config(arguments.configfile)
    if config["run"] != arguments.run_dir.name:
        raise ConfigError(
            f"{arguments.configfile}: is the config of run {config['run']}, and --run-dir is {arguments.run_dir}; name that run's "
            "config with --configfile"
        )
    watch = RunWatch(config, arguments.run_dir, arguments.store or arguments.run_dir.parent / "store")
    if arguments.json:
        print(json.dumps(watch.look(time.time()), indent=2))
    elif arguments.once:
        Console(width=160, no_color=True, highlight=False).print(view(watch.look(time.time())))
    else:
        with Live(view(watch.look(time.time())), auto_refresh=False) as live:
            while True:
                time.sleep(arguments.interval)
                live.update(view(watch.look(time.time())), refresh=True)


if __name__ == "__main__":
    program.run(main)
