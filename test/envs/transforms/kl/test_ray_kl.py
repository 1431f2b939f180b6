"""A reference in a Ray actor penalises as one in this process does."""

from __future__ import annotations

import pytest
from collectors.ray_helper import start_ray
from envs.transforms.kl.kl_helper import Scorer, divergences, make_row, rewards

from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.envs.transforms import (
    KLRewardTransform,
    RayKLRewardTransform,
    RayRetrieveKL,
    RetrieveKL,
)
from torchrl_llm.errors import MissingExtraError


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    for kind in (RayRetrieveKL, RayKLRewardTransform):
        with pytest.raises(MissingExtraError, match="ray"):
            kind(ref_model=Scorer())


@pytest.mark.ray
def test_both_do_what_their_local_forms_do():
    ray = pytest.importorskip("ray")
    start_ray(ray, num_cpus=2)
    rows = lazy_rows([make_row([0.0, -0.5, -0.5]), make_row([0.0, -0.25])])
    # The second finds the reference that the first has started, as environments share one.
    one, free = Scorer(0.5), {"num_cpus": 0, "actor_name": "kl-reference"}
    asked = {"use_ray_service": True, **free}
    pairs = [
        (RetrieveKL(one, Scorer()), RayRetrieveKL(one, Scorer(), **free)),
        (KLRewardTransform(Scorer()), KLRewardTransform(ref_model_factory=Scorer, **asked)),
    ]
    try:
        for local, remote in pairs:
            expected, found = local(rows.clone()), remote(rows.clone())
            assert divergences(found) == divergences(expected)
            assert rewards(found) == rewards(expected)
        assert isinstance(pairs[1][1], RayKLRewardTransform)
    finally:
        ray.shutdown()
