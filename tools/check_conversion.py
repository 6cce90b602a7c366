"""Does my converted script train the same as before? It runs both, and says where they part:

python tools/check_conversion.py "python train.py --epochs 2" \\
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --epochs 2"

The status is 0 where they train, print and save the same, 1 where not, 2 where that cannot be
said. Each run has a copy of this folder; nothing in the folder itself changes.
"""
import argparse
import os
import signal
import sys
import traceback

from conversion_check.ending import check_again, check_original
from conversion_check.running import run
from conversion_check.verdict import judge
from conversion_check.workspace import CannotSay, Workspace


def check(args, workspace):
    first = run(args.before, workspace, args)
    check_original(first)
    again = run(args.before, workspace, args, CHECK_CONVERSION_NUDGE=1)
    check_again(first, again)
    status = judge(first, again, run(args.after, workspace, args))
    if changed := workspace.changed():
        raise CannotSay(f"{changed[0]} has changed meanwhile: by one of the scripts, if not by you")
    return status


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the command that trains in one process")
    parser.add_argument("after", help="the command that trains with DDP")
    parser.add_argument("--link", action="append", default=[], metavar="DIR",
                        help="a folder that is too large to copy: it is read where it is")
    parser.add_argument("--without", action="append", default=[], metavar="PATTERN",
                        help="files that the copies lack: 'checkpoints/*.pt'")
    parser.add_argument("--float64", action="store_true", help="sharper, where the data allow it")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS",
                        help="how long it may go without a step before it hangs (60)")
    return parser.parse_args()


def main(args):
    args.interrupted = []  # looked at where nothing is half done
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: args.interrupted.append(True))
    workspace = None
    try:
        workspace = Workspace(os.getcwd(), args.link, args.without)
        return check(args, workspace)
    except CannotSay as reason:
        print(f"cannot be judged: {reason}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        print("cannot be judged: an error of the check's own", file=sys.stderr)
    finally:
        if workspace:
            workspace.remove()
    return 2


if __name__ == "__main__":
    sys.exit(main(parse_args()))
