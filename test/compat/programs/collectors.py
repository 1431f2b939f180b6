"""Collectors: how many turns a batch has, in which shape, and where batches go."""

from __future__ import annotations

import functools
import itertools
import time

from _shared import model, show, tokenizer
from torchrl.collectors.llm import LLMCollector, vLLMUpdater, vLLMUpdaterV2
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.modules.llm import TransformersWrapper

GREEDY = {"max_new_tokens": 3, "do_sample": False}


class Questions:
    """A data loader of short questions that never ends."""

    batch_size = 1

    def __init__(self):
        self.numbers = itertools.count()

    def __iter__(self):
        return self

    def __next__(self):
        return {"query": [f"What is {next(self.numbers)}+1?"]}


def policy():
    return TransformersWrapper(
        model(), tokenizer=tokenizer(), input_mode="history", generate_kwargs=GREEDY
    )


def env(rows=1, steps=2):
    made = ChatEnv.from_dataloader(
        Questions(), tokenizer=tokenizer(), batch_size=(rows,), input_mode="history"
    )
    return made if steps is None else made.append_transform(StepCounter(max_steps=steps))


def collector(environment=None, **options):
    return LLMCollector(env() if environment is None else environment, policy=policy(), **options)


def buffer():
    return ReplayBuffer(storage=LazyStackStorage(64), batch_size=2)


def roles(batch):
    return [row["history"].full.role for row in batch.reshape(-1).unbind(0)]


def turns_of_a_batch():
    made = collector(dialog_turns_per_batch=3, total_dialog_turns=6)
    for batch in made:
        show(batch.shape, len(batch["history"].full.unbind(0)))


def several_rows_a_batch():
    made = collector(env(2), dialog_turns_per_batch=4, total_dialog_turns=8)
    show([batch.shape for batch in made])


def turns_that_do_not_divide():
    made = collector(env(2), dialog_turns_per_batch=3, total_dialog_turns=6)
    show([batch.shape for batch in made])


def flat_batches():
    made = collector(env(2), dialog_turns_per_batch=4, total_dialog_turns=4, flatten_data=True)
    show([batch.shape for batch in made])


def one_batch_by_next():
    made = collector(dialog_turns_per_batch=2)
    show(made.next().shape, next(iter(made)).shape)


def conversations_of_a_batch():
    made = collector(dialog_turns_per_batch=2, total_dialog_turns=2)
    for batch in made:
        show([sorted(set(map(str, role))) for role in roles(batch)])


def keys_of_a_batch():
    for batch in collector(dialog_turns_per_batch=2, total_dialog_turns=2):
        wanted = ("history", "text", "tokens", "masks", "log_probs", "query", "done", "next")
        show([key in batch for key in wanted])
        show(batch["next", "done"].shape, batch["next", "done"].flatten())
        show(batch["next", "step_count"].flatten())


def completed_trajectories():
    made = collector(yield_completed_trajectories=True, dialog_turns_per_batch=1)
    for batch in itertools.islice(made, 2):
        show(batch.shape, batch["next", "done"].flatten())


def completed_trajectories_of_two_rows():
    made = collector(env(2, 3), yield_completed_trajectories=True, dialog_turns_per_batch=4)
    for batch in itertools.islice(made, 2):
        show(batch.shape, batch["next", "done"].flatten())


def completed_trajectories_until_the_end():
    made = collector(
        env(2), yield_completed_trajectories=True, dialog_turns_per_batch=2, total_dialog_turns=8
    )
    show([batch.shape for batch in made])


def last_steps_alone():
    made = collector(env(1, 3), yield_only_last_steps=True, dialog_turns_per_batch=1)
    for batch in itertools.islice(made, 2):
        show(batch.shape, batch["next", "done"].flatten(), batch["next", "step_count"].flatten())


def last_steps_count_all_turns():
    made = collector(
        env(1, 3), yield_only_last_steps=True, dialog_turns_per_batch=1, total_dialog_turns=6
    )
    show([batch.shape for batch in made])


def a_factory_of_the_policy():
    made = LLMCollector(env(), policy_factory=policy, dialog_turns_per_batch=1)
    show(made.next().shape, type(made.policy).__name__)


def into_a_replay_buffer():
    rows = buffer()
    made = collector(dialog_turns_per_batch=2, total_dialog_turns=4, replay_buffer=rows)
    show([batch is None for batch in made], len(rows), rows.sample().shape)


def rows_of_a_replay_buffer():
    rows = buffer()
    made = collector(env(2), dialog_turns_per_batch=4, total_dialog_turns=4, replay_buffer=rows)
    for _ in made:
        pass
    show(len(rows), rows[:].shape, rows.sample(3)["history"].full.shape[0])


def completed_trajectories_into_a_replay_buffer():
    rows = buffer()
    made = collector(
        yield_completed_trajectories=True,
        dialog_turns_per_batch=1,
        total_dialog_turns=4,
        replay_buffer=rows,
    )
    for _ in made:
        pass
    show(len(rows), made.flatten_data)


def next_to_training():
    rows = buffer()
    made = collector(dialog_turns_per_batch=1, total_dialog_turns=4, replay_buffer=rows)
    made.start()
    deadline = time.monotonic() + 4
    while len(rows) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    made.shutdown()
    show(len(rows))


def a_new_beginning_at_each_iteration():
    made = collector(
        env(1, None), dialog_turns_per_batch=1, total_dialog_turns=3, reset_at_each_iter=True
    )
    show([roles(batch) for batch in made])


def conversations_that_go_on():
    made = collector(env(1, None), dialog_turns_per_batch=1, total_dialog_turns=2)
    show([len(batch["history"].full[0, 0].role) for batch in made])


def a_postprocessing_set_later():
    made = collector(dialog_turns_per_batch=2)
    made.set_postproc(lambda batch: batch[..., :1])
    show(made.next().shape)
    try:
        made.set_postproc(lambda batch: batch)
        show("taken")
    except Exception:
        show("refused")


def environments_that_step_on_their_own():
    pool = AsyncEnvPool([env], backend="threading", stack="lazy")
    made = collector(pool, yield_completed_trajectories=True, dialog_turns_per_batch=1)
    show(made.async_envs)
    for batch in itertools.islice(made, 2):
        show(batch.shape, batch["next", "done"].flatten())
    made.shutdown()


def member(question):
    made = ChatEnv.from_dataloader(
        [{"query": question}], tokenizer=tokenizer(), batch_size=(1,), input_mode="history"
    )
    return made.append_transform(StepCounter(max_steps=1))


def members_whose_first_rows_differ():
    members = [functools.partial(member, text) for text in ("Hi!", "A longer one, is it not?")]
    pool = AsyncEnvPool(members, backend="threading", stack="lazy")
    show([row["history"].prompt.content for row in pool.reset().unbind(0)])
    pool.close()


def sizes_of_a_collector():
    made = collector(dialog_turns_per_batch=3, total_dialog_turns=7)
    show(made.dialog_turns_per_batch, made.total_dialog_turns, made.flatten_data)
    show(made.requested_frames_per_batch, made.total_frames)


def settings_of_a_collector():
    made = collector(dialog_turns_per_batch=1)
    show(made.yield_completed_trajectories, made.yield_only_last_steps, made.async_envs)
    show(made.reset_at_each_iter, made.verbose, made.postproc, made.replay_buffer)
    show(made.policy_version_tracker, type(made.policy).__name__)


def the_policy_of_a_collector():
    made = collector(dialog_turns_per_batch=1)
    show(made.policy.collector is made, made.get_policy_model() is model())


def versions_of_the_policy():
    made = collector(dialog_turns_per_batch=1, track_policy_version=True)
    show(made.policy_version, made.next()["policy_version"].flatten())
    made.increment_version()
    show(made.policy_version, made.get_policy_version())
    show(type(made.policy_version_tracker).__name__)


def versions_by_a_transform_of_my_own():
    tracker = PolicyVersion(version_type="int")
    made = collector(dialog_turns_per_batch=1, track_policy_version=tracker)
    show(made.policy_version_tracker is tracker, made.policy_version)
    made.increment_version()
    show(tracker.version)


def weights_brought_to_the_policy():
    made = collector(dialog_turns_per_batch=1, track_policy_version=True)
    made.update_policy_weights_()
    show(type(made.policy_version).__name__)


def used_after_its_end():
    made = collector(dialog_turns_per_batch=1)
    made.next()
    made.shutdown()
    show("shut down")


def settings_of_an_updater():
    made = vLLMUpdater(master_address="localhost", master_port=29501, vllm_tp_size=1)
    show(made.master_address, made.vllm_tp_size, made.collector, made.model_metadata)


def metadata_of_a_model():
    metadata = vLLMUpdater.get_model_metadata(policy())
    show(len(metadata), sorted(metadata)[:2], metadata["model.norm.weight"])


PROGRAMS = {
    "one_batch_by_rollout": lambda: show(collector(dialog_turns_per_batch=2).rollout().shape),
    "last_steps_of_no_completed_trajectories": lambda: collector(
        yield_only_last_steps=True, yield_completed_trajectories=False, dialog_turns_per_batch=1
    ),
    "last_steps_that_are_flat": lambda: collector(
        yield_only_last_steps=True, flatten_data=True, dialog_turns_per_batch=1
    ),
    "no_size_of_a_batch": lambda: collector(),
    "neither_policy_nor_factory": lambda: LLMCollector(env(), dialog_turns_per_batch=1),
    "a_factory_of_the_environment": lambda: show(
        collector(env, dialog_turns_per_batch=1).next().shape
    ),
    "asynchronous_without_a_pool": lambda: collector(dialog_turns_per_batch=1, async_envs=True),
    "the_version_where_nobody_counts": lambda: show(
        collector(dialog_turns_per_batch=1).policy_version
    ),
    "a_seed": lambda: show(type(collector(dialog_turns_per_batch=1).set_seed(3)).__name__),
    "an_updater_of_an_engine_by_an_argument": lambda: vLLMUpdater(v2=True, master_port=29501),
    "an_updater_of_no_engine": lambda: vLLMUpdaterV2(object()),
    "a_postprocessing": lambda: show(
        collector(dialog_turns_per_batch=2, postproc=lambda batch: batch[..., :1]).next().shape
    ),
}
"""Programs of one expression."""
