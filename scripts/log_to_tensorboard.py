#!/usr/bin/env python3
"""log_to_tensorboard.py -- a run's log.jsonl as curves:  scripts/log_to_tensorboard.py RUN_DIR [tensorboard|wandb]"""
import sys

from plot import BadInput, number, read_log


def main(run, to="tensorboard"):
    records, step = read_log(run), 0
    if to == "wandb":
        import wandb
        writer = wandb.init(project="cable.c", name=run)
        put, close = lambda name, value, at: writer.log({name: value}, step=at), writer.finish
    else:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        writer = SummaryWriter(run)
        put, close = writer.add_scalar, writer.close
    for r in records:
        step = max(step, int(number(r, "step") or 0))       # evaluations have no step: they belong to the last one
        for key in sorted(r.keys() - {"step", "T"}):
            if number(r, key) is not None:
                put(f"{r.get('kind')}/{key}" + (f" at T {r['T']}" if "T" in r else ""), number(r, key), step)
    close()


if __name__ == "__main__":
    try:
        if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["tensorboard"], ["wandb"]):
            raise BadInput(__doc__)
        main(*sys.argv[1:])
    except (BadInput, ImportError) as e:
        sys.exit(f"{e}" + ("; pip install tensorboardX, or wandb" if isinstance(e, ImportError) else ""))
