"""RetrieveLogProb: another model's log-probs beside the rows."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import pad_rows, ragged_rows, read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.data.scoring import TokenScorer, TokenScores
from torchrl_llm.envs.transforms import RetrieveLogProb, RetrieveTeacherLogProb
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import SFTLoss


class Scorer(TokenScorer):
    """log p = -id / temperature, so that every value shows its token and its row."""

    def __init__(self):
        self.scale = torch.ones((), requires_grad=True)

    def token_scores(self, sequences, select, *, temperature=1.0, entropy=False, extras=None):
        temperature = torch.as_tensor(temperature).expand(len(sequences))
        values = [
            -ids[mask].float() / t
            for ids, mask, t in zip(sequences, select, temperature, strict=True)
        ]
        return TokenScores(torch.cat(values) * self.scale)


@pytest.fixture
def rows():
    full = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    masks = [torch.tensor([False, True, True]), torch.tensor([False, True])]
    return TensorDict(
        tokens=ragged_rows({"full": full, "temperature": [torch.tensor(1.0), torch.tensor(2.0)]}),
        masks=ragged_rows({"all_assistant_mask": masks}),
        batch_size=[2],
    )


def values(td):
    return [row.tolist() for row in read_rows(td, ("next", "ref_log_probs", "full"))]


def test_assistant_tokens_are_scored_at_their_rows_temperature(rows):
    assert values(RetrieveLogProb(Scorer())(rows)) == [[0, -6, -7], [0, -4.5]]


def test_every_token_but_the_first_can_be_scored(rows):
    mask = [torch.tensor([True, False, False]), torch.tensor([False, False])]
    rows["masks"] = ragged_rows({"all_assistant_mask": mask})
    assert values(RetrieveLogProb(Scorer())(rows.copy())) == [[0, 0, 0], [0, 0]]
    td = RetrieveLogProb(Scorer(), assistant_only=False)(rows)
    assert values(td) == [[0, -6, -7], [0, -4.5]]


def test_no_gradient_unless_asked(rows):
    td = RetrieveLogProb(Scorer())(rows.copy())
    assert not read_rows(td, ("next", "ref_log_probs", "full"))[0].requires_grad
    td = RetrieveLogProb(Scorer(), detach=False)(rows)
    assert read_rows(td, ("next", "ref_log_probs", "full"))[0].requires_grad


def test_an_existing_next_is_kept_and_the_key_can_be_chosen(rows):
    rows["next"] = TensorDict(reward=torch.ones(2, 1, 1), batch_size=[2])
    td = RetrieveLogProb(Scorer(), log_probs_full_key=("teacher", "full"))(rows)
    assert td["next", "reward"].sum() == 2
    assert len(read_rows(td, ("next", "teacher", "full"))) == 2


def test_what_is_missing_is_named(rows):
    with pytest.raises(DataError, match="tokens"):
        RetrieveLogProb(Scorer())(TensorDict(batch_size=[2]))
    del rows["masks"]
    with pytest.raises(DataError, match="all_assistant_mask"):
        RetrieveLogProb(Scorer())(rows)
    with pytest.raises(ConfigError, match="TokenScorer"):
        RetrieveLogProb(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="two parts"):
        RetrieveLogProb(Scorer(), log_probs_full_key="flat")


def test_in_an_environment_the_log_probs_go_to_next(tokenizer):
    from envs.fake_policy import AnsweringPolicy

    from torchrl_llm.envs import DatasetChatEnv

    env = DatasetChatEnv(dataset=[{"query": "a"}, {"query": "bcd"}], num_envs=2, shuffle=False)
    scorer = Module()
    env.append_transform(RetrieveLogProb(scorer, assistant_only=False))
    td = env.rollout(2, AnsweringPolicy(tokenizer=tokenizer))
    assert scorer.calls == 4  # two rows, two turns, each once
    for row in range(2):
        for turn in range(2):
            ids = read_rows(td[:, turn], ("tokens", "full"))[row]
            scored = read_rows(td[:, turn], ("next", "ref_log_probs", "full"))[row]
            assert scored.tolist() == [0, *(-ids[1:]).float().tolist()]


class Module(torch.nn.Module, Scorer):
    """A scorer with weights and a mode, as the policy in training is."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.calls = 0

    def token_scores(self, sequences, select, **options):
        self.calls += len(sequences)
        return super().token_scores(sequences, select, **options)


def row(ids, prompt, *, traj=0, done=True, **columns):
    full = torch.tensor(ids)
    mask = torch.arange(len(ids)) >= prompt
    return TensorDict(
        tokens={"prompt": full[:prompt], "response": full[prompt:], "full": full},
        masks={"all_assistant_mask": mask, "all_attention_mask": torch.ones_like(mask)},
        next={"reward": torch.ones(1, 1), "done": torch.tensor([done])},
        traj_id=torch.tensor(traj),
        **columns,
    )


PROX = {"log_probs_full_key": ("prox_log_probs", "full"), "root": True}


def test_a_buffer_writes_the_log_probs_with_the_rows_and_keeps_them():
    policy = Module()
    buffer = ReplayBuffer(batch_size=2)
    buffer.append_transform(RetrieveLogProb(policy, **PROX))
    buffer.extend([row([5, 6, 7], 1), row([8, 9], 1)])
    with torch.no_grad():
        policy.scale.fill_(3.0)  # an update: what is proximal is the policy before it
    stored = read_rows(buffer[:], ("prox_log_probs", "full"))
    assert [r.tolist() for r in stored] == [[0, -6, -7], [0, -9]]
    assert not stored[0].requires_grad
    sampled = buffer.sample()
    assert {tuple(r.tolist()) for r in read_rows(sampled, ("prox_log_probs", "full"))} == {
        (0, -6, -7),
        (0, -9),
    }
    assert policy.calls == 2


def test_the_rows_that_were_given_stay_as_they_are():
    given = row([5, 6, 7], 1)
    buffer = ReplayBuffer(transform=RetrieveLogProb(Scorer()))
    buffer.extend([given])
    assert ("next", "ref_log_probs") not in given.keys(True)
    assert buffer[0]["next", "ref_log_probs", "full"].tolist() == [0, -6, -7]
    assert buffer[0]["next", "reward"].item() == 1


def test_torchrls_own_way_to_write_with_a_forward_transform_gives_the_same():
    buffer = ReplayBuffer()
    buffer.append_transform(RetrieveLogProb(Scorer()), invert=True)
    buffer.extend([row([5, 6, 7], 1)])
    assert buffer[0]["next", "ref_log_probs", "full"].tolist() == [0, -6, -7]


def test_before_the_joining_of_turns_each_token_is_scored_once():
    policy = Module()
    buffer = ReplayBuffer()
    buffer.append_transform(RetrieveLogProb(policy, **PROX))
    buffer.append_transform(JoinTurns())
    first, second = row([5, 6, 7], 1, done=False), row([5, 6, 7, 8, 9], 4)
    second["masks", "all_assistant_mask"] = torch.tensor([0, 1, 1, 0, 1]).bool()
    buffer.extend([first, second])
    assert policy.calls == 1
    assert buffer[0]["prox_log_probs", "full"].tolist() == [0, -6, -7, 0, -9]


def test_neither_mode_nor_state_of_the_buffer_reach_the_model():
    policy = Module().train()
    transform = RetrieveLogProb(policy, **PROX)
    buffer = ReplayBuffer()
    buffer.append_transform(transform)
    assert policy.training
    assert transform.model is policy
    assert not transform.state_dict()
    transform.to(torch.float64)
    assert policy.scale.dtype is torch.float32


def test_padding_is_not_scored(rows):
    rows = TensorDict(
        tokens={"full": torch.tensor([[5, 6, 7], [8, 9, 0]])},
        masks={"all_attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()},
        batch_size=[2],
    )
    td = RetrieveLogProb(Scorer(), assistant_only=False)(rows)
    assert values(td) == [[0, -6, -7], [0, -9, 0]]


def test_rows_without_a_token_to_score_do_not_run_through_the_model(rows):
    rows["masks"] = ragged_rows(
        {"all_assistant_mask": [torch.zeros(3).bool(), torch.tensor([False, True])]}
    )
    policy = Module()
    assert values(RetrieveLogProb(policy)(rows.copy())) == [[0, 0, 0], [0, -4.5]]
    assert policy.calls == 1
    rows["masks"] = ragged_rows({"all_assistant_mask": [torch.zeros(3) > 0, torch.zeros(2) > 0]})
    assert values(RetrieveLogProb(policy)(rows)) == [[0, 0, 0], [0, 0]]
    assert policy.calls == 1


def test_an_environment_refuses_to_write_into_the_root(tokenizer):
    from torchrl_llm.envs import DatasetChatEnv

    env = DatasetChatEnv(dataset=[{"query": "a"}], num_envs=1)
    env.append_transform(RetrieveLogProb(Scorer(), **PROX))
    with pytest.raises(ConfigError, match="replay buffer"):
        env.reset()


def test_only_a_module_can_be_moved():
    assert RetrieveLogProb(Module(), device="cpu").model.scale.device.type == "cpu"
    with pytest.raises(ConfigError, match="no module"):
        RetrieveLogProb(Scorer(), device="cpu")


def test_one_row_alone_is_scored_too():
    single = RetrieveLogProb(Scorer())(row([5, 6, 7], 1))
    assert single["next", "ref_log_probs", "full"].tolist() == [0, -6, -7]


@pytest.mark.parametrize(("budget", "calls"), [(None, [4]), (7, [2, 1, 1]), (1, [1, 1, 1, 1])])
def test_a_budget_cuts_the_calls_and_changes_nothing(budget, calls):
    class Counting(Scorer):
        seen = ()

        def token_scores(self, sequences, select, **options):
            self.seen = [*self.seen, len(sequences)]
            return super().token_scores(sequences, select, **options)

    lengths = (3, 2, 6, 4)
    made = [row(list(range(9 - n, 9)), 1) for n in lengths]
    for index, one in enumerate(made):
        one["tokens", "temperature"] = torch.tensor(1.0 + index)
    scorer = Counting()
    buffer = ReplayBuffer(transform=RetrieveLogProb(scorer, token_budget=budget))
    buffer.extend(made)
    assert scorer.seen == calls  # padded: 2 rows of 3 are 6 tokens, a third of 6 would make 18
    for index, length in enumerate(lengths):
        expected = [0.0, *(-id / (1 + index) for id in range(10 - length, 9))]
        got = buffer[index]["next", "ref_log_probs", "full"].tolist()
        assert got == pytest.approx(expected, abs=1e-6)


class TestLikeTorchRL:
    """Spellings of TorchRL that must mean the same, or say why not."""

    def test_conversations_alone_are_encoded_as_the_loss_encodes_them(self, tokenizer):
        chats = [
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
            for text in ("b", "b c d")
        ]
        settings = {"return_assistant_tokens_mask": True, "padding": False, "return_dict": True}
        transform = RetrieveLogProb(Scorer(), tokenizer=tokenizer, tokenizer_kwargs=settings)
        td = transform(TensorDict(history={"full": History.from_chats(chats)}, batch_size=[2]))
        loss = SFTLoss(Scorer(), tokenizer=tokenizer, kl_to_ref_coeff=0.1)
        assert loss(td).kl_to_ref == 0.0  # aligned, or it would be refused
        encoded = transform.formatter.encode_batch(chats, add_generation_prompt=False)
        for row, own in zip(read_rows(td, transform.written), encoded, strict=True):
            assert row.tolist() == (-own.token_ids * own.assistant).tolist()

    def test_several_teachers_get_their_own_conversations(self, tokenizer):
        chats = [
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
            for text in ("b", "b c d", "e")
        ]
        history = History.from_chats(chats)
        names = NonTensorStack("one", "two", "one")
        td = TensorDict(history={"full": history}, domain=names, batch_size=[3])
        transform = RetrieveTeacherLogProb({"one": Scorer(), "two": Scorer()}, tokenizer=tokenizer)
        alone = RetrieveLogProb(Scorer(), tokenizer=tokenizer)(td.copy())
        got = read_rows(transform(td), ("next", "teacher_log_probs", "full"))
        assert [row.tolist() for row in got] == values(alone)

    def test_settings_that_cannot_be_kept_are_refused(self, tokenizer):
        with pytest.raises(ConfigError, match="add_generation_prompt"):
            RetrieveLogProb(
                Scorer(), tokenizer=tokenizer, tokenizer_kwargs={"add_generation_prompt": True}
            )
        with pytest.raises(ConfigError, match="padding_side"):
            RetrieveLogProb(Scorer(), padding_side="both")

    def test_the_name_that_the_model_was_given_is_used(self, rows):
        model = Scorer()
        model.log_probs_key = "old_log_probs"
        td = RetrieveLogProb(model)(rows)
        assert ("next", "old_log_probs", "full") in td.keys(True)

    def test_rollouts_of_two_dimensions_are_explained(self, rows):
        with pytest.raises(DataError, match=r"reshape\(-1\)"):
            RetrieveLogProb(Scorer())(torch.stack([rows, rows]))

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_is_no_prefix_on_either_side(self, tiny_model, side):
        full = [torch.tensor([5, 6, 7, 8]), torch.tensor([8, 9])]
        masks = [torch.ones(len(ids), dtype=torch.bool) for ids in full]
        ragged = TensorDict(tokens=ragged_rows({"full": full}), batch_size=[2])
        dense = TensorDict(batch_size=[2])
        dense["tokens", "full"] = pad_rows(full, 1, side=side)
        kept = dense["masks", "all_attention_mask"] = pad_rows(masks, False, side=side)
        transform = RetrieveLogProb(CausalScorer(tiny_model), assistant_only=False)
        found, expected = values(transform(dense)), values(transform(ragged))
        for row, mask, right in zip(found, kept, expected, strict=True):
            torch.testing.assert_close(torch.tensor(row)[mask], torch.tensor(right))
