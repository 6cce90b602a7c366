"""README and its chapters: their text, and their lines of Python at work in several ranks."""
import ast
import re
from pathlib import Path

from launch import ROOT, train

CHAPTERS = {file: file.read_text() for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]}
EXAMPLES = {  # and arguments that suit three processes
    "waves": ["--epochs", "2"], "steps": ["--max-steps", "20", "--batch-size", "36"],
    "contrastive": ["--epochs", "1"], "stream": ["--epochs", "1", "--samples", "961"]}
IN_RANKS = """import copy
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

def check(model, alone):
    for one, whole in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(one.grad, whole.grad, rtol=0, atol=1e-12)

{definitions}

def main():
    {code}

main()
dist.destroy_process_group()
"""


def blocks(language):
    text = "\n".join(CHAPTERS.values())
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def block(text, indent=0):
    """The one block of the chapters that has this text, so far to the right that it continues a function."""
    found, = (block for block in blocks("python") if text in block)
    return found.rstrip().replace("\n", "\n" + " " * indent)


def in_ranks(code, processes=3):
    """Run these lines, with what examples/contrastive_ddp.py defines, in each rank."""
    pair = ast.parse((ROOT / "examples/contrastive_ddp.py").read_text())
    definitions = [ast.unparse(part) for part in pair.body if isinstance(part, ast.ClassDef | ast.FunctionDef)]
    Path("ranks.py").write_text(IN_RANKS.format(code=code.strip().replace("\n", "\n    "), definitions="\n\n".join(definitions)))
    return train(Path("ranks.py").resolve(), processes=processes, device=False)
