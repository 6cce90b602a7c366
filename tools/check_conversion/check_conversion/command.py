"""Checks that a converted script trains the same as before, by running both:

check-conversion "python train.py --epochs 2" \\
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --epochs 2"

The status is 0 if both train, print and save the same, 1 if not, 2 if that
cannot be judged. Each run has a copy of this folder, which itself is not changed.
"""
import argparse
import functools
import itertools
import os
import signal
import sys
import traceback

from check_conversion import resume
from check_conversion.judge import check_original, check_start, judge
from check_conversion.running import prepare, run
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_conversion(original, converted):
    """The verdict; both run their command, with options of records.Settings."""
    after = converted()  # first: it says whether the check needs another option
    check_start(after)
    before = original()
    check_original(before)
    return judge(before, original(nudged=True), after)


def check(args, workspace):
    count = itertools.count(1)

    def once(command, **options):
        how = ", started again" * ("again" in options)
        if "killed_at" in options:
            how = f", killed at step {options['killed_at']}"
        print(f"run {next(count)} of 3{how}: {command}", file=sys.stderr, flush=True)
        return run(command, workspace, args.patience, prepare(workspace, **options))
    if args.resume:
        return resume.check_resuming(functools.partial(once, args.resume, intervene=False))
    told = {"float64": not args.float32, "batchnorm": args.batchnorm}
    return check_conversion(*(functools.partial(once, one, **told) for one in (args.original, args.converted)))


def parse_args():
    parser = argparse.ArgumentParser(
        prog="check-conversion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", nargs="?", help="the command that trains in one process")
    parser.add_argument("converted", nargs="?", help="the command that trains with DDP")
    parser.add_argument("--resume", metavar="COMMAND",
                        help="instead: does this one resume as if it had not been killed?")
    parser.add_argument("--sync-batchnorm", dest="batchnorm", action="store_const", const="sync", default="",
                        help="compare BatchNorm as SyncBatchNorm, as on GPUs")
    parser.add_argument("--rank-batchnorm", dest="batchnorm", action="store_const", const="rank",
                        help="BatchNorm of each rank's own: do not compare it")
    parser.add_argument("--float32", action="store_true",
                        help="compare in float32: less sensitive, faster on GPUs")
    parser.add_argument("--link", action="append", default=[], metavar="DIR",
                        help="a large folder, read where it is instead of copied")
    parser.add_argument("--without", action="append", default=[], metavar="PATTERN",
                        help="files to leave out of the copies: 'checkpoints/*.pt'")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS",
                        help="without activity, a run counts as hung (default: 60)")
    args = parser.parse_args()
    if bool(args.resume) == bool(args.converted) or (args.resume and (args.original or args.float32 or args.batchnorm)):
        parser.error("give two commands, or --resume and one, which is run as it is")
    return args


def interrupt(*_):
    """Once: what has been started is still to be ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main():
    """The status: 0 the same, 1 not the same, 2 cannot be judged."""
    args, workspace = parse_args(), None
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        workspace = Workspace(os.getcwd(), args.link, args.without)
        verdict = check(args, workspace)
        if changed := workspace.changed():
            raise CannotSay(f"{changed[0]} changed during the check: one of the scripts changed it, unless you did")
        print(*verdict.lines, sep="\n")
        return verdict.status
    except CannotSay as reason:
        print(f"cannot be judged: {reason}", file=sys.stderr)
    except KeyboardInterrupt:
        print("cannot be judged: interrupted", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        print("cannot be judged: the check itself failed", file=sys.stderr)
    finally:
        if workspace:
            workspace.remove()
    return 2
