#!/usr/bin/env python3
"""log_to_tensorboard.py -- a run's log.jsonl as curves, for tensorboard --logdir RUN_DIR or for wandb:

    scripts/log_to_tensorboard.py RUN_DIR [tensorboard|wandb]

It needs only that package.
"""
import time

import console
from plot import number, read_log


def tensorboard(run, config):
    """(put, close): put({name: value}, step)"""
    writer = console.need("tensorboard.summary.writer.event_file_writer").EventFileWriter(run)
    Event = console.need("tensorboard.compat.proto.event_pb2").Event
    Summary = console.need("tensorboard.compat.proto.summary_pb2").Summary

    def put(values, step):
        values = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
    return put, writer.close


def wandb(run, config):
    writer = console.need("wandb").init(project="cable.c", name=run, config=config)
    return writer.log, writer.finish


def main(argv):
    p = console.parser(__doc__)
    p.add_argument("run", metavar="RUN_DIR")
    p.add_argument("to", nargs="?", choices=("tensorboard", "wandb"), default="tensorboard")
    args = p.parse_args(argv)
    run, to = args.run, wandb if args.to == "wandb" else tensorboard
    records = read_log(run)
    configs = [r for r in records if r.get("kind") == "config"]
    put, close = to(run, configs[0] if configs else {})
    step = 0
    for r in records:
        step = max(step, int(number(r, "step") or 0))       # evaluations have no step: they belong to the last one
        where = f" at T {r['T']}" if "T" in r else ""
        values = {f"{r.get('kind')}/{key}{where}": number(r, key) for key in sorted(r.keys() - {"step", "T"})
                  if number(r, key) is not None}
        if values:
            put(values, step)
    close()
    print(f"{run}: {len(records):,} records for {to.__name__}")


if __name__ == "__main__":
    console.run(main)
