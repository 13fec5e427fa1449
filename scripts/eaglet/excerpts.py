"""A row's text for people, short: the end of the prompt, the output's start and end, and the place in question.

Text made here is never tokenized again.
"""

from collections.abc import Callable, Sequence

import numpy as np

EDGE, AROUND = 24, 12  # ids shown at the ends of prompt and output, and on each side of the place in question
OUTPUT, HERE = "⟦output⟧", "⟦here⟧"


def excerpt(
    decode: Callable[[Sequence[int]], str], prompt_ids: np.ndarray, output_ids: np.ndarray, place: int = -1
) -> str:
    """`place` is an index into `output_ids` that is shown as ⟦here⟧; −1 for none."""
    length = len(output_ids)
    cuts = [(0, EDGE), (length - EDGE, length)]
    if 0 <= place <= length:
        cuts.append((place - AROUND, place + AROUND))
    windows: list[list[int]] = []
    for start, stop in sorted((max(0, start), min(length, stop)) for start, stop in cuts):
        if windows and start <= windows[-1][1]:
            windows[-1][1] = max(windows[-1][1], stop)
        else:
            windows.append([start, stop])
    told = []
    for start, stop in windows:
        pieces = (
            [output_ids[start:place], output_ids[place:stop]] if start <= place <= stop else [output_ids[start:stop]]
        )
        told.append(HERE.join(_text(decode, piece) for piece in pieces))
    before = "…" if len(prompt_ids) > EDGE else ""
    return f"{before}{_text(decode, prompt_ids[-EDGE:])}{OUTPUT}{' … '.join(told)}"


def _text(decode: Callable[[Sequence[int]], str], ids: np.ndarray) -> str:
    """The text of ids; where the tokenizer does not know one, all of them as numbers."""
    try:
        return decode(ids.tolist())
    except (OverflowError, IndexError, KeyError, TypeError):
        return " ".join(f"⟨{i}⟩" for i in ids.tolist())
