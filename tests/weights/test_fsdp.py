"""FSDP in one process: it gathers its weights before each forward and frees them after, without
counting that in their version."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from autocast_backend._torch.fsdp import managed_by_fsdp
from tests.support import assert_same_bits

from .support import EAGER, STOCK, bf16, casts_made, data, make, ours


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Block(), Block())


def steps(**arguments: Any) -> list[torch.Tensor]:
    """The outputs of three steps of training, each block compiled and sharded on its own."""
    torch._dynamo.reset()
    model = make(Blocks)
    mesh = init_device_mesh("cpu", (1,))
    for block in model:
        block.compile(**arguments)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for x in data(3, 2, 8):
        with bf16():
            output = model(x)
        output.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach())
    return outputs


@pytest.mark.usefixtures("one_process_group")
def test_casts_of_what_fsdp_manages_stay_in_the_graph() -> None:
    expected = steps(**EAGER)
    assert not torch.equal(expected[0], expected[1])
    found: list[torch.Tensor] = []
    assert casts_made(lambda: found.extend(steps(**ours()))) == 0
    assert_same_bits(found, expected)


@pytest.mark.usefixtures("one_process_group")
def test_version_refuses_what_fsdp_manages() -> None:
    with pytest.raises(RuntimeError, match=r"linear.*FSDP manages this weight"):
        steps(**ours(weight_cache="version"))


@pytest.mark.usefixtures("one_process_group")
def test_weights_of_the_first_fsdp_stay_in_the_graph() -> None:
    model = FullyShardedDataParallel(
        nn.Linear(8, 8, bias=False), use_orig_params=True, device_id=torch.device("cpu")
    )
    [weight] = model.parameters()

    def call(lifetime: str) -> None:
        torch._dynamo.reset()
        with bf16():
            torch.compile(lambda w, x: x @ w, **ours(weight_cache=lifetime))(weight, data(3, 8))

    assert casts_made(lambda: call("scope")) == 0
    with pytest.raises(RuntimeError, match="w: FSDP manages this weight"):
        call("version")


@pytest.mark.usefixtures("one_process_group")
def test_a_module_whose_weights_are_on_several_meshes() -> None:
    block = Block()
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    state = fully_shard.state(block)  # type: ignore[attr-defined]
    if not hasattr(state, "_fsdp_param_groups"):
        pytest.skip("this version of PyTorch has one group for each module")
    [group] = state._fsdp_param_groups
    gathered = torch.empty(8, 8)
    group.fsdp_params[0]._unsharded_param = gathered
    state._fsdp_param_groups = [copy.copy(group), group]
    assert managed_by_fsdp([torch.empty(8, 8), gathered]) == [gathered]


class Outer(nn.Module):
    """The layer inside of it is still of its own class when this is sharded, so that Dynamo calls
    what it has compiled before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def gradients_after_late_sharding(**arguments: Any) -> dict[str, torch.Tensor]:
    """Those of three calls in one context, each with a backward, of what was called before it was
    sharded. It stays gathered: nothing is written between the calls."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Outer())
    model[1].inner.compile(**arguments)
    with bf16():
        model(data(3, 8)).float().sum().backward()
    model.zero_grad()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[1], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    with bf16():
        for x in data(3, 3, 8):
            model(x).float().square().sum().backward()
    for sharded in (model[1], model):
        sharded.reshard()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("one_process_group")
def test_weights_that_are_sharded_when_compiled_already() -> None:
    """A cast that the calls share, as eager mode's, would hand its gradients over when FSDP has
    reduced what the layer had, as in eager mode, where those of later calls are lost."""
    expected = gradients_after_late_sharding(**STOCK)
    found = gradients_after_late_sharding(**ours())
    assert found.keys() == expected.keys()
    assert_same_bits(list(found.values()), list(expected.values()))
    with pytest.raises(RuntimeError, match=r"of shape \[8\]: FSDP manages this weight"):
        gradients_after_late_sharding(**ours(weight_cache="version"))
