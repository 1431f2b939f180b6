"""Optimizers of other packages, Muon with AdamW, schedule-free ones, and states on the CPU."""

import pytest
import torch
from torch import nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import load_model, load_tokenizer
from torchrl_llm.trainers import TrainingRun, make_optimizer, make_scheduler
from torchrl_llm.trainers.optimizers import OptimizerOnCpu, check_optimizer, in_training
from torchrl_llm.trainers.run_config import CheckpointConfig, LoggingConfig

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
ADAM8 = "bitsandbytes.optim:AdamW8bit"
FREE = "schedulefree:AdamWScheduleFree"


class Plain(torch.optim.SGD):
    """An optimizer of one's own."""


class Averaging(torch.optim.Optimizer):
    """Schedule-free SGD: y is trained, x = the mean of z is what counts."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "y": 0.9, "count": 0, "train_mode": False})

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    @torch.no_grad()
    def _swap(self, mode):
        for group in self.param_groups:
            if group["train_mode"] != mode and group["count"]:
                for p in group["params"]:
                    z = self.state[p]["z"]
                    share = 1 - group["y"] if mode else 1 - 1 / group["y"]
                    p.lerp_(z, share)
            group["train_mode"] = mode

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["train_mode"]
            group["count"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / group["y"])
                z -= group["lr"] * p.grad
                x.lerp_(z, 1 / group["count"])
                p.copy_(x.lerp(z, 1 - group["y"]))


OWN = f"{__name__}:Averaging"


def take_steps(folder, *, steps, resume="never", lora=None, **arguments):
    torch.manual_seed(0)
    model = load_model(lora=lora).train()
    optimizer = make_optimizer(model, lr=1e-2, **arguments)
    scheduler = make_scheduler(optimizer, name="linear", total_steps=5)
    run = TrainingRun(
        folder,
        max_steps=steps,
        model=model,
        tokenizer=load_tokenizer(),
        parts={"optimizer": optimizer, "scheduler": scheduler},
        logging=LoggingConfig(progress=False, backend=[]),
        checkpoint=CheckpointConfig(interval=1, resume=resume),
    )
    for step in run.steps():
        with in_training(optimizer):
            model(IDS + step, labels=IDS).loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.record({"train/reward": 0.0, "train/tokens_generated": 1})
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "Muon"},
        {"name": "Muon", "on_cpu": True},
        {"name": "AdamW", "on_cpu": True},
        {"name": OWN},
        {"name": ADAM8},
        {"name": FREE},
    ],
    ids=str,
)
def test_a_run_goes_on_bit_for_bit(tmp_path, arguments):
    if ":" in arguments["name"] and arguments["name"] != OWN:
        pytest.importorskip(arguments["name"].split(".")[0].split(":")[0])
    whole = take_steps(tmp_path / "whole", steps=4, **arguments)
    take_steps(tmp_path / "cut", steps=2, **arguments)
    again = take_steps(tmp_path / "cut", steps=4, resume="auto", **arguments)
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    start = dict(load_model().named_parameters())
    assert not any(torch.equal(whole[name], value) for name, value in start.items())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_states_on_the_cpu_change_no_bit(tmp_path, name):
    plain, on_cpu = (
        take_steps(tmp_path / str(is_on), steps=3, name=name, on_cpu=is_on, weight_decay=0.1)
        for is_on in (False, True)
    )
    assert all(torch.equal(on_cpu[key], value) for key, value in plain.items())


def test_states_on_the_cpu_go_on_in_a_run_without():
    weight = nn.Parameter(torch.ones(3))
    made = [make_optimizer([weight], name="AdamW", lr=0.1, on_cpu=on) for on in (True, False)]
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    made[0].step()
    made[1].load_state_dict(made[0].state_dict())
    assert isinstance(made[0], OptimizerOnCpu)
    # (1 - beta1) g after the first step
    assert torch.allclose(made[1].state[weight]["exp_avg"], 0.1 * weight.grad)


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest():
    model = load_model()
    muon, adamw = make_optimizer(model, name="Muon", lr=0.1, betas=(0.8, 0.9)).param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert sorted(names[id(p)] for p in muon["params"]) == sorted(
        n for n in names.values() if "proj" in n
    )
    assert {names[id(p)] for p in adamw["params"]} == {n for n in names.values() if "proj" not in n}
    assert (muon["adjust_lr_fn"], adamw["betas"]) == ("match_rms_adamw", (0.8, 0.9))
    # every matrix, where its place is not known
    muon, _ = make_optimizer(nn.Linear(2, 2).parameters(), name="Muon", lr=0.1).param_groups
    assert [tuple(p.shape) for p in muon["params"]] == [(2, 2)]


def test_each_half_of_muon_is_that_of_torch():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    matrix, bias = (nn.Parameter(p.detach().clone()) for p in layer.parameters())
    both = make_optimizer(layer, name="Muon", lr=0.1, weight_decay=0.2, momentum=0.8)
    alone = [
        torch.optim.Muon(
            [matrix], lr=0.1, weight_decay=0.2, momentum=0.8, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([bias], lr=0.1, weight_decay=0.2),
    ]
    for seed in range(3):
        torch.manual_seed(seed)
        layer.weight.grad, layer.bias.grad = torch.randn(4, 4), torch.randn(4)
        matrix.grad, bias.grad = layer.weight.grad.clone(), layer.bias.grad.clone()
        for optimizer in (both, *alone):
            optimizer.step()
    assert torch.equal(layer.weight, matrix)
    assert torch.equal(layer.bias, bias)


def test_weights_are_the_average_outside_of_training():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer([weight], name=OWN, lr=1.0)
    seen = []
    for gradient in (1.0, 3.0):
        with in_training(optimizer):
            weight.grad = torch.tensor([gradient])
            optimizer.step()
            seen.append(weight.item())
        seen.append(weight.item())
    # z is -1, then -4; x their mean, -1 and -2.5; y = 0.9 x + 0.1 z
    assert seen == pytest.approx([-1, -1, 0.9 * -2.5 + 0.1 * -4, -2.5])
    with in_training(torch.optim.SGD([weight], lr=1.0)):
        pass
    with pytest.raises(ConfigError, match=r"on_cpu=true does not go with Averaging"):
        make_optimizer([weight], name=OWN, lr=1.0, on_cpu=True)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_such_module:Adam", (), "'no_such_module:Adam' cannot be imported"),
        ("torch.optim:Adaam", (), "there is no 'Adaam' in torch.optim"),
        ("torch.nn:Linear", (), "torch.nn:Linear is no torch.optim.Optimizer"),
        ("torch.optim:Optimizer", (), "takes no learning rate"),
        ("torch.optim:SGD", ("betas",), r"optimizer\.betas has no effect: torch.optim:SGD"),
        ("AdamW", ("min_8bit_size",), r"optimizer\.min_8bit_size has no effect: AdamW"),
        ("AdamW8bit", (), "no usable 'AdamW8bit'.*'module:Class'"),
    ],
)
def test_what_cannot_be_used_is_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_optimizer(name, arguments)


def test_one_of_ones_own_is_built():
    optimizer = make_optimizer([nn.Parameter(torch.ones(1))], name=f"{__name__}:Plain", lr=0.1)
    assert (type(optimizer).__name__, optimizer.defaults["lr"]) == ("Plain", 0.1)


class Rounded(torch.Tensor):
    """A number that is held in another form, as torchao holds states."""


class OddStates(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["mean"] = torch.zeros_like(each).as_subclass(Rounded)


def test_states_that_no_checkpoint_can_hold_are_refused_before_the_first_step():
    message = "keeps its states as Rounded, which no checkpoint can hold"
    for on_cpu in (False, True):
        with pytest.raises(ConfigError, match=message):
            make_optimizer(nn.Linear(2, 2), name=f"{__name__}:OddStates", lr=0.1, on_cpu=on_cpu)
