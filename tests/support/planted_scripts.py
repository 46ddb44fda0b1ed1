"""Users' scripts whose fault is served or refused, with the one place switched off that does it:
`lightning-3d verify` must find each."""

from __future__ import annotations

from dataclasses import dataclass

from faulty_scripts import UNPROVED, UNWATCHED_HOOKS, UNWATCHED_READS

from lightning_3d.app.verification.advice import (
    BEGINNING,
    GRADIENTS,
    PARTS,
    READING,
    ROWS,
    TOGETHER,
    VALUES,
    WRITTEN,
)


@dataclass(frozen=True)
class Planted:
    """A script with its fault, and what verify must say.

    Attributes:
        kind: row of the list of kinds.
        text: what replaces the middle of the script.
        layout: a layout in which it goes wrong.
        first: part of the line that names the first difference.
        looks_like: the kind that verify must name.
    """

    kind: str
    text: str
    layout: str
    first: str
    looks_like: str


LLAMA = """
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model(
    "llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    initializer_range=0.2,
)
rows = torch.randint(1, 16, (48, 8), generator=torch.Generator().manual_seed(0))
more = {"plan": None}

class Mine(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, ids, batch_idx):
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""  # noqa: E501
"""A language model of a known family."""

UNCHECKED = """
from importlib import import_module
from lightning_3d.engine.self_check.check import SelfCheck
SelfCheck.inspect = lambda self, *args, **kwargs: None
import_module("lightning_3d.engine.assembly").fit_styles = lambda module, plan, size: plan
"""
"""As if a self-check was remembered for another model."""

NEW_PARAMETERS = """
from importlib import import_module

def replace_parameters(module, specs):
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if name in specs and specs[name].is_cut:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, nn.Parameter(specs[name].cut(parameter.detach())))

import_module("lightning_3d.parallel.tensor.rewrite")._shard_parameters = replace_parameters
"""  # noqa: E501
"""Shards are new objects, so that what belonged to the old ones is lost."""

NEW_IN_CONFIGURE = """
from importlib import import_module

initialize = import_module("lightning_3d.weights.initialize")

def lose_hooks(parameter, values, put=initialize.put_values):
    put(parameter, values)
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None

initialize.put_values = lose_hooks
"""

HOOKED = """
class Mine(Plain):
    def __init__(self):
        super().__init__()
        for block in self.net.blocks:
            block.up.weight.register_hook(lambda gradient: 0 * gradient)

more = {"plan": SPLIT}
"""
POST_HOOKED = """
def shrink(parameter):
    parameter.grad.mul_(0.1)

class Mine(Plain):
    def configure_model(self):
        if not hasattr(self, "late"):
            self.net = Net()
            for parameter in self.net.leave.parameters():
                parameter.register_post_accumulate_grad_hook(shrink)
            self.late = True
"""
GROUPS = """
class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.noted = {id(block.up.weight) for block in self.net.blocks}

    def configure_optimizers(self):
        noted = [p for p in self.parameters() if id(p) in self.noted]
        others = [p for p in self.parameters() if id(p) not in self.noted]
        return torch.optim.SGD([{"params": others}, *([{"params": noted, "lr": 0.1}] if noted else [])], lr=1e-2)

more = {"plan": SPLIT}
"""  # noqa: E501

ANSWERING_STUBS = """
from contextlib import nullcontext
from lightning_3d.parallel.pipeline import gates, left_behind
gates.written_by = gates.attributes_of = lambda module: frozenset()
gates.AbsentPart.forget = lambda self, name: None
left_behind.LeftBehind.watching = lambda self, index: nullcontext()
left_behind.LeftBehind.hide = left_behind.LeftBehind.show = lambda self, *args: None
"""
BALANCED = """
class Balanced(Block):
    def __init__(self):
        super().__init__()
        self.balance = 0.0

    def forward(self, x):
        self.balance = self.up(x).square().mean()
        return super().forward(x)

class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.net.blocks = nn.ModuleList(Balanced() for _ in range(2))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(block.balance for block in self.net.blocks)
"""  # noqa: E501
COUNTING = """
class Counting(Block):
    def __init__(self):
        super().__init__()
        self.entropy = 0.0

    def forward(self, x):
        self.entropy = float(x.detach().square().mean())
        return super().forward(x)

class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.net.blocks = nn.ModuleList(Counting() for _ in range(2))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("entropy", sum(block.entropy for block in self.net.blocks))
        return loss
"""

CROSSED = """
class Crossed(Block):
    def forward(self, x):
        h = self.up(x)
        return x + self.down(h / (0.1 + h.square().mean(-1, keepdim=True).sqrt()))

class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.net.blocks = nn.ModuleList(Crossed() for _ in range(2))

more = {"plan": SPLIT, "micro_batch_size": None}
"""

WITHOUT_OWN_CODE = """
from lightning_3d.engine.self_check import check, remembered
check.has_own_code = remembered.has_own_code = lambda module: False
"""
"""The list of verified families knows names of classes only."""

HOOKED_FAMILY = (
    LLAMA
    + """
class Llama(Mine):
    def __init__(self):
        super().__init__()
        for layer in self.model.model.layers:
            layer.mlp.register_forward_hook(lambda module, args, out: out - out.mean(1, keepdim=True))

Mine = Llama
"""  # noqa: E501
)

REPLACED_ATTENTION = """
from lightning_3d.parallel.context import checks
checks._attends_otherwise = lambda module: False
"""
SOFTENED = (
    LLAMA
    + """
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

def softened(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scores = query @ key.transpose(-1, -2) * scaling / 4
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if attention_mask is None else attention_mask
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None

AttentionInterface.register("softened", softened)
AttentionMaskInterface.register("softened", sdpa_mask)
config._attn_implementation = "softened"
"""  # noqa: E501
)

FUSED_HEAD = (
    LLAMA
    + """
class Fused(Mine):
    def __init__(self):
        super().__init__()
        self.model.model.requires_grad_(False)

    def training_step(self, ids, batch_idx):
        hidden = self.model.model(ids).last_hidden_state
        logits = hidden @ self.model.lm_head.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

Mine = Fused
"""
)

LISTS_WHOLE = """
from lightning_3d.parallel import nested
nested._are_rows = lambda *args: False
"""
TASKS = """
class Rows(torch.utils.data.Dataset):
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return {"x": self.x[row], "y": self.x[row].sin(), "task": ("easy", "hard", "odd")[(row * 7 + row // 3) % 3]}

rows = Rows()

class Mine(Plain):
    def training_step(self, batch, batch_idx):
        weight = {"easy": 0.2, "hard": 2.0, "odd": 1.0}
        parts = zip(self.net(batch["x"]), batch["y"], batch["task"])
        return torch.stack([weight[task] * (a - b).square().mean() for a, b, task in parts]).mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch["x"])
"""  # noqa: E501

TWO_CALLS = (
    LLAMA
    + """
class Twice(Mine):
    def training_step(self, ids, batch_idx):
        some = torch.where((ids % 3 == 0).cumsum(1) > 2, ids, -100)
        return self.model(input_ids=ids, labels=ids).loss + self.model(input_ids=ids.flip(1), labels=some).loss

Mine = Twice
"""  # noqa: E501
)
CONTRASTIVE = """
class Mine(Plain):
    def loss(self, out, y):
        z = F.normalize(out, dim=-1)
        return F.cross_entropy(z @ z.T * 5, torch.arange(len(z), device=z.device))
"""
VARIANCE = """
class Mine(Plain):
    def loss(self, out, y):
        return F.mse_loss(out, y) + F.relu(1 - out.std(0)).mean()
"""
CLASS_WEIGHTS = """
class Mine(Plain):
    def loss(self, out, y):
        return F.cross_entropy(out, y.argmax(1), weight=torch.linspace(0.1, 5, 8))
"""
MIXUP = """
class Mine(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        other = torch.arange(len(x)).roll(1)
        out = self.net(0.7 * x + 0.3 * x[other])
        return 0.7 * F.mse_loss(out, y) + 0.3 * F.mse_loss(out, y[other])
"""
ROOT = """
class Mine(Plain):
    def loss(self, out, y):
        return F.mse_loss(out, y).sqrt()
"""

UNWATCHED_COLLECTIVES = """
from contextlib import nullcontext
from lightning_3d.engine.step import runner
runner.watching_world_collectives = lambda report: nullcontext()
"""
GATHERED = """
class Mine(Plain):
    def loss(self, out, y):
        share = out.detach().square().mean()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(share)
        return F.mse_loss(out, y) * (1 + share)
"""

CLIPPED_NOTHING = """
class Mine(Plain):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1)

more = {"zero_stage": 2}
"""  # noqa: E501
NOISY_GRADIENTS = """
class Mine(Plain):
    def on_before_optimizer_step(self, optimizer):
        generator = torch.Generator().manual_seed(self.global_step)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.1 * torch.randn(parameter.shape, generator=generator)
"""

NORMED = """
class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.net.enter = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
"""
SPECTRAL = """
from torch.nn.utils.parametrizations import spectral_norm

class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.net.enter = spectral_norm(nn.Linear(8, 16))
"""
COUNTED_IDS = """
class Words(Net):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 8, {option})

    def forward(self, x):
        return super().forward(x + self.words((x[:, 0] > 0).long() + (x[:, 1] > 1).long()))

class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.net = Words()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""

TRIALS_STAY = """
from contextlib import nullcontext
from lightning_3d.engine.self_check import check
check.undone = lambda module: nullcontext()
"""
FIRST_CALLS = """
calls = []

def warm(module, args, out):
    if module.training:
        calls.append(1)
    return out * (1 + 1 / max(1, len(calls)))

class Mine(Plain):
    def __init__(self):
        super().__init__()
        self.net.blocks[1].register_forward_hook(warm)

more = {"plan": SPLIT, "micro_batch_size": None, "self_check": "always"}
"""

FORGETFUL = """
from lightning_3d.parallel.blocks import recompute
recompute.repeating = lambda forward, modules: forward
"""
SWAPPED = """
class Mine(Plain):
    def training_step(self, batch, batch_idx):
        weights = {name: p * 1.5 for name, p in self.net.named_parameters()}
        return F.mse_loss(torch.func.functional_call(self.net, weights, (batch[0],)), batch[1])

more = {"recompute": "full"}
"""

LAYOUT_DECIDES = """
from lightning_3d.parallel.context import inputs
inputs._makes_cache = lambda *args: False
"""
PACKED = (
    LLAMA
    + """
class Packed(Mine):
    def training_step(self, ids, batch_idx):
        positions = torch.arange(8, device=ids.device).remainder(4).expand(len(ids), -1)
        return self.model(input_ids=ids, position_ids=positions, labels=ids).loss

Mine = Packed
"""
)

UNGUARDED_UNITS = """
from lightning_3d.parallel.zero import parameter_units
parameter_units.ParameterUnits._require_use = lambda self, *args: None
"""
GENERATED = (
    LLAMA
    + """
class Speaking(Mine):
    def on_train_batch_end(self, *args):
        with torch.no_grad():
            found = self.model(input_ids=rows[:2].to(self.device)).logits.argmax(-1)
        self.log("token", found.float().mean())

Mine = Speaking
more = {"plan": None, "zero_stage": 3}
"""
)

UNSEEDED_WORKERS = """
from lightning_3d.strategy import rank_hooks
rank_hooks.seed_workers = lambda *args: None
"""
WORKERS = """
class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, row):
        import random
        import numpy
        x = torch.full((8,), random.random() + numpy.random.rand())
        return x, x

rows = Drawn()
workers = 1
"""

PLANTED = [
    Planted(
        "hook of a parameter", NEW_PARAMETERS + HOOKED, "tp2", "gradient norm of step 1", GRADIENTS
    ),
    Planted(
        "hook in configure_model",
        NEW_IN_CONFIGURE + POST_HOOKED,
        "dp2",
        "gradient norm of step 1",
        TOGETHER,
    ),
    Planted("groups by id", NEW_PARAMETERS + GROUPS, "tp2", "weight", WRITTEN),
    Planted("losses of blocks", ANSWERING_STUBS + BALANCED, "pp2", "loss of step 1", PARTS),
    Planted(
        "counters of blocks",
        ANSWERING_STUBS + COUNTING,
        "pp2",
        "logged value entropy of step 1",
        VALUES,
    ),
    Planted("remembered check", UNCHECKED + CROSSED, "tp2", "loss of step 1", PARTS),
    Planted("hook on a family", WITHOUT_OWN_CODE + HOOKED_FAMILY, "cp2", "loss of step 1", PARTS),
    Planted(
        "own attention",
        WITHOUT_OWN_CODE + REPLACED_ATTENTION + SOFTENED,
        "cp2",
        "loss of step 1",
        PARTS,
    ),
    Planted("fused head", UNWATCHED_READS + FUSED_HEAD, "tp2", "loss of step 1", PARTS),
    Planted("lists", UNPROVED + LISTS_WHOLE + TASKS, "pp2", "loss of step 1", ROWS),
    Planted("two calls", UNPROVED + TWO_CALLS, "pp2", "loss of step 1", ROWS),
    Planted("contrastive", UNPROVED + CONTRASTIVE, "dp2", "loss of step 1", ROWS),
    Planted("variance", UNPROVED + VARIANCE, "pp2", "loss of step 1", ROWS),
    Planted("class weights", UNPROVED + CLASS_WEIGHTS, "dp2", "loss of step 1", ROWS),
    Planted("mixup", UNPROVED + MIXUP, "pp2", "loss of step 1", ROWS),
    Planted("root", UNPROVED + ROOT, "dp2", "loss of step 1", ROWS),
    Planted(
        "collectives", UNPROVED + UNWATCHED_COLLECTIVES + GATHERED, "tp2", "loss of step 1", ROWS
    ),
    Planted("scaled gradients", UNWATCHED_HOOKS + CLIPPED_NOTHING, "dp2", "of step 1", WRITTEN),
    Planted("noise on gradients", UNWATCHED_HOOKS + NOISY_GRADIENTS, "pp2", "of step 1", WRITTEN),
    Planted("batch norm", UNPROVED + NORMED, "dp2", "loss of step 1", ROWS),
    Planted("spectral norm", UNPROVED + SPECTRAL, "dp2", "of step 1", ROWS),
    Planted(
        "scaled by frequency",
        UNPROVED + COUNTED_IDS.format(option="scale_grad_by_freq=True"),
        "dp2",
        "norm of step 1",
        TOGETHER,
    ),
    Planted(
        "largest norm",
        UNPROVED + COUNTED_IDS.format(option="max_norm=0.5"),
        "dp2",
        "initial weights",
        BEGINNING,
    ),
    Planted("trials with hooks", TRIALS_STAY + FIRST_CALLS, "tp2", "loss of step 1", PARTS),
    Planted(
        "swapped and recomputed", UNPROVED + FORGETFUL + SWAPPED, "dp2", "norm of step 1", GRADIENTS
    ),
    Planted("packed documents", LAYOUT_DECIDES + PACKED, "cp2", "loss of step 1", PARTS),
    Planted(
        "calls in hooks", UNGUARDED_UNITS + GENERATED, "dp2", "logged value token of step 1", VALUES
    ),
    Planted("workers", UNSEEDED_WORKERS + WORKERS, "pp2", "data", READING),
]
