#!/usr/bin/env python3
"""log_to_tensorboard.py -- a run's log.jsonl as curves, for tensorboard --logdir RUN_DIR or for wandb:

    scripts/log_to_tensorboard.py RUN_DIR [tensorboard|wandb] [--follow]

It needs only that package. Each number that a run measures becomes a curve, at the times of its records; lengths and
other settings are in the curves' names, or left out. --follow copies what the run adds until Ctrl-C.

Running it again copies what is new and doubles nothing: RUN_DIR/events.out.tfevents.log depends on log.jsonl alone, and
is replaced after a run was resumed at an earlier step (restart TensorBoard then); wandb continues its run.
"""
import datetime
import hashlib
import io
import json
import os
import re
import time

import console
from console import BadInput
from plot import number, read_log, stretch_of

MEASURED = re.compile(r"loss|ppl|lr|norm|accuracy|acc_norm|exact_share|entropy|distance|window90|live_tiles|"
                      r"dead_heads|mrr|(ndcg|recall)@\d+|groups|ms|tok_per_s|mfu|mem")
PLACES = ("stride", "layer", "head", "file")          # where a number was measured, beside T


def seconds(record):
    """the record's time, None if it has none"""
    try:
        return datetime.datetime.fromisoformat(record["time"].replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError):
        return None


def name_of(record, key):
    where = f" at T {record['T']}" if "T" in record else ""
    for place in PLACES:
        if place in record and (place, record[place]) != ("stride", record.get("T")):
            where += f", {place} {record[place]}"
    return f"{record.get('kind')}/{key}{where}{stretch_of(record)}"


def events_of(records):
    """[(time, step, {name: value})]; an evaluation has no step: it belongs to the last one"""
    events, now, step = [], 0, 0
    for r in records:
        step = max(step, int(number(r, "step") or 0))
        if step >= 1 << 63:
            raise BadInput(f"log.jsonl: expected steps below 2^63, got {step}")
        now = seconds(r) or now + (number(r, "ms") or 0) / 1e3          # an older log has one time, in its config
        values = {name_of(r, key): number(r, key) for key in sorted(r) if MEASURED.fullmatch(key)}
        values = {name: value for name, value in values.items() if value is not None}
        if values:
            events.append((now, step, values))
    return events


def tensorboard(run, config):
    """(copy, close): copy(events) brings what is there up to date"""
    Writer = console.need("tensorboard.summary.writer.record_writer").RecordWriter
    Event = console.need("tensorboard.compat.proto.event_pb2").Event
    Summary = console.need("tensorboard.compat.proto.summary_pb2").Summary
    path = os.path.join(run if os.path.isdir(run) else os.path.dirname(run), "events.out.tfevents.log")

    def copy(events):
        data = io.BytesIO()
        file = Writer(data)
        file.write(Event(wall_time=seconds(config) or 0, file_version="brain.Event:2").SerializeToString())
        for now, step, values in events:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            file.write(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())
        old = console.read_bytes(path) if os.path.exists(path) else b""
        if data.getvalue().startswith(old):
            with os.fdopen(console.open_end(path), "ab") as f:
                f.write(data.getvalue()[len(old):])
        else:
            console.write_whole(path, data.getvalue())
    return copy, lambda: None


def wandb(run, config):
    identity = hashlib.sha256((os.path.realpath(run) + json.dumps(config)).encode()).hexdigest()[:16]
    writer = console.need("wandb").init(project="cable.c", name=run, id=identity, resume="allow", config=config)
    copied = []

    def copy(events):
        for now, step, values in events[len(copied):]:
            writer.log({**values, "_timestamp": now}, step=step)
        copied.extend(events[len(copied):])
    return copy, writer.finish


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("run", metavar="RUN_DIR")
    p.add_argument("to", nargs="?", choices=("tensorboard", "wandb"), default="tensorboard")
    p.add_argument("--follow", action="store_true", help="copy what the run adds, too, until Ctrl-C")
    args = p.parse_args(argv)
    records = read_log(args.run)
    to = {"tensorboard": tensorboard, "wandb": wandb}[args.to]
    copy, close = to(args.run, next((r for r in records if r.get("kind") == "config"), {}))
    try:
        copy(events_of(records))
        while args.follow:
            time.sleep(1 + len(records) / 1e4)
            records = read_log(args.run)
            copy(events_of(records))
    finally:
        close()
    print(f"{args.run}: {len(records):,} records for {args.to}")


if __name__ == "__main__":
    console.run(main)
