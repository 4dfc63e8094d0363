"""Many requests at once: what octavo's engine tells with 1, 4 and 16 answers side by side.

    python -m benchmarks.serving [--rounds 5] [--answer 64] [--no-write]

The model is SmolLM2-135M-Instruct (benchmarks/smollm2.py). Every request reads a prompt of 64 tokens of its own and
answers with as many tokens as asked for, each the likeliest. A round serves 1, 4 and 16 requests in turn. Prompts are
read first; what is timed is decode: from the moment when every request has told a token to the end, tokens told in it.
Beside it stand the prompts' own speed, and 16 requests whose prompts share 448 of 512 tokens with one that was there.

What a request tells with 15 others is compared with what it tells alone, token by token.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console

from benchmarks import smollm2
from benchmarks.measure import hardware, ratio, verdict, write_result
from octavo.errors import DataError
from octavo.kernels import cpu
from octavo.serving import Engine, EngineConfig, Event, SamplingParams, ServedModel, load_served_model

PROMPT, SHARED, LONG = 64, 448, 512  # tokens
COMPANY = (1, 4, 16)
BAR = 4.0  # of 16 requests over one


def main() -> None:
    """Time, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answer", type=int, default=64, help="tokens of every answer")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    if (absence := cpu.why_absent()) is not None:
        parser.exit(2, f"there are no native kernels to time: {absence}\n")
    machine = f"{hardware()}, kernels for {cpu.levels()[-1]}"
    try:
        served = load_served_model(smollm2.model_path())
    except DataError as error:
        parser.exit(2, f"{error}\n")
    lines = measured(served, rounds=arguments.rounds, answer=arguments.answer)
    console = Console()
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if not arguments.no_write:
        command = f"python -m benchmarks.serving --rounds {arguments.rounds} --answer {arguments.answer}"
        written = write_result("serving", lines, title="Serving SmolLM2-135M", command=command, machine=machine)
        console.print(f"written to {written}", markup=False)


def measured(served: ServedModel, *, rounds: int, answer: int) -> list[str]:
    """The table, and whether company changed an answer."""
    ids = smollm2.text_tokens(served.tokenizer)
    prompts = [ids[i * LONG : i * LONG + PROMPT] for i in range(max(COMPANY))]
    speeds: dict[int, list[float]] = {count: [] for count in COMPANY}
    answers: dict[int, list[list[int]]] = {}
    for _ in range(rounds):
        for count in COMPANY:
            speed, answers[count] = decoded(served, prompts[:count], answer)
            speeds[count].append(speed)
    alone = [decoded(served, [prompt], answer)[1][0] for prompt in prompts]
    same = sum(a == b for a, b in zip(answers[max(COMPANY)], alone, strict=True))
    return [
        *table(speeds),
        "",
        f"Median of {rounds} interleaved rounds; over one: median of the rounds' ratios (quartiles).",
        "",
        f"{same} of {len(alone)} answers told among {max(COMPANY)} are those told alone.",
        "",
        *prompt_lines(served, ids, rounds),
    ]


def table(speeds: dict[int, list[float]]) -> list[str]:
    """Tokens a second beside those of one request."""
    rows = ["| requests | tokens/s | of each | over one | bar |", "| --- | --- | --- | --- | --- |"]
    seconds = {str(count): [1 / speed for speed in found] for count, found in speeds.items()}
    for count, found in speeds.items():
        speed, times = statistics.median(found), ratio(seconds, "1", str(count))
        bar = f"at least {BAR:g}: {verdict(times.median >= BAR)}" if count == max(COMPANY) else ""
        rows.append(f"| {count} | {speed:.0f} | {speed / count:.0f} | {times} | {bar} |")
    return rows


def decoded(served: ServedModel, prompts: Sequence[list[int]], answer: int) -> tuple[float, list[list[int]]]:
    """Tokens a second once every request has told one, and what each told."""
    engine = new_engine(served)
    told = [submit(engine, prompt, answer) for prompt in prompts]
    while not all(told):
        engine.step()
    before, start = sum(map(len, told)), time.perf_counter()
    while engine.step():
        pass
    speed = (sum(map(len, told)) - before) / (time.perf_counter() - start)
    return speed, [[event.token for event in events if event.token is not None] for events in told]


def prompt_lines(served: ServedModel, ids: list[int], rounds: int) -> list[str]:
    """How fast prompts are read, new ones and those that begin as another did."""
    start = ids[:SHARED]
    fresh, reused = [], []
    for _ in range(rounds):
        engine = new_engine(served)
        fresh.append(seconds_to_read(engine, [ids[:LONG]]))
        ends = [ids[LONG * i : LONG * i + LONG - SHARED] for i in range(1, max(COMPANY) + 1)]
        reused.append(seconds_to_read(engine, [[*start, *end] for end in ends]))
    one, more, count = statistics.median(fresh), statistics.median(reused), max(COMPANY)
    return [
        f"A prompt of {LONG} tokens is read in {one:.2f} s, {LONG / one:.0f} tokens/s.",
        f"{count} more that share {SHARED} of them are read in {more:.2f} s, {count * LONG / more:.0f} tokens/s.",
    ]


def seconds_to_read(engine: Engine, prompts: Sequence[list[int]]) -> float:
    """From submission until every request has told its one token."""
    begun = time.perf_counter()
    for prompt in prompts:
        submit(engine, prompt, 1)
    while engine.step():
        pass
    return time.perf_counter() - begun


def new_engine(served: ServedModel) -> Engine:
    """An engine of its own, with an empty cache."""
    return Engine(served.runner, served.tokenizer, config=EngineConfig(max_running=max(COMPANY)))


def submit(engine: Engine, prompt: list[int], answer: int) -> list[Event]:
    """Ask for the likeliest tokens, whatever ends the model's answers; the events to be."""
    told: list[Event] = []
    engine.submit(prompt, SamplingParams(max_tokens=answer, temperature=0, ignore_end=True), told.append)
    return told


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
