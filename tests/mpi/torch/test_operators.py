# SPDX-License-Identifier: Apache-2.0
"""The operators of PyTorch, as its own checks see them: schemas, aliases, shapes for the compiler, and gradients."""

from tests.helpers.fresh import run_fresh

SCRIPT = """
import sys

import torch
import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.torch import float8, forms, operators, regions, vocabulary

def numbers(*shape):
    return torch.randn(shape, requires_grad=True)

with pb.Context() as ctx:
    name, product = ctx.name, operators.product
    assert pb.__version__ in name  # what PyTorch has compiled for another version is not taken
    for form in forms.FORMS:
        keep, given = forms.FORMS[form].gathers == "x", (numbers(8, 16), numbers(12, 16), numbers(12))
        yield_ = form, name, False, keep, True, None, "auto", "auto"
        torch.library.opcheck(product, (*given, *yield_))
        with torch.no_grad():
            product(*given, *yield_)
            called = set()
            sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name))
            product(*given, *yield_)
            sys.setprofile(None)
        # without a gradient it computes at once, without a look at operands like earlier ones
        assert not called & {"redispatch", "seen_of"}, form
    x = numbers(8, 16)
    for forward, back in (("same", "sum"), ("sum", "same"), ("part", "gather"), ("gather", "part"), ("gather", "same")):
        torch.library.opcheck(regions.region, (x, name, forward, back, 0, 8 if forward == "gather" else None))
    words, weight = torch.arange(8), numbers(20, 16)
    torch.library.opcheck(vocabulary.vocab_embedding, (words, weight, name, 20, -1, False))
    torch.library.opcheck(vocabulary.vocab_losses, (numbers(8, 20), words, None, name, -100, 0.1))
print("done")
"""


def test_operators_are_what_pytorch_expects():
    done = run_fresh(SCRIPT)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
