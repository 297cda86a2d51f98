"""The training loop: read, learn, measure, keep. A run that is ended at any point goes on as if it had not been."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from outrider.core.errors import ConfigError, UsageError
from outrider.heads.save import save_head
from outrider.train import checkpoint
from outrider.train.batches import Batch, Features, collate
from outrider.train.config import TrainConfig
from outrider.train.curves import Curves, point
from outrider.train.data import Sample
from outrider.train.disk import DiskFullError, check_room
from outrider.train.identity import Origin
from outrider.train.modules.base import DrafterModule, Tally
from outrider.train.optimizer import Optimizers
from outrider.train.order import batches, data_digest, digest, in_order, split
from outrider.train.stop import TrainingStoppedError, stop_on_signals

_POINTS = 200
"""Points of the training curves."""
_FIRST_LOOK = 80_000
"""Tokens that a drafter may look at before it learns."""
_FREE_TO_RESUME = ("checkpoint_minutes",)
"""What may differ when a run goes on, since it does not change what is learned."""


class Store(Protocol):
    """Samples and their features: see `outrider.train.features.FeatureStore`."""

    @property
    def samples(self) -> Sequence[Sample]: ...

    def read_many(self, indices: Iterable[int]) -> Iterator[Features]: ...


@dataclass
class _Progress:
    """update: those done. tally: of the updates since the last point of the curves. curves: so far."""

    update: int
    tally: Tally | None
    curves: Curves


def train(
    store: Store,
    module: DrafterModule,
    config: TrainConfig,
    out_dir: Path,
    *,
    origin: Origin,
    resume: bool = True,
    show_progress: bool = True,
) -> Curves:
    """Train ``module`` in place, and write the drafter, its curves and checkpoints to ``out_dir``.

    origin: what ``store`` and ``module`` were made of. resume: go on from the checkpoint in ``out_dir``, if there is
    one; False: start anew. Bit for bit the same drafter comes of it as of an unbroken run with as many threads,
    wherever the run was ended.

    Raises UsageError if there is nothing to train on, or if the checkpoint is of other data; ConfigError if it is of
    another configuration, drafter or origin; TrainingStoppedError after SIGTERM or Ctrl-C; DiskFullError if the disk
    is nearly full. After the last two the checkpoint is as new as it can be.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    run = _Run(store, module, config, out_dir, origin)
    if resume:
        run.resume()
    with (
        stop_on_signals() as stop,
        closing(run),
        tqdm(
            total=run.updates, initial=run.progress.update, unit="update", desc=module.method, disable=not show_progress
        ) as bar,
    ):
        run.prepare()
        for batch in run.upcoming():
            bar.set_postfix(run.learn(batch), refresh=False)
            bar.update()
            run.measure_if_due()
            if stop.number is not None and run.progress.update < run.updates:
                run.save()
                done = f"{run.progress.update} of {run.updates} updates"
                raise TrainingStoppedError(f"stopped after {done}; the same command goes on from there", stop.number)
            run.save_if_due()
        return run.finish()


class _Run:
    def __init__(self, store: Store, module: DrafterModule, config: TrainConfig, out_dir: Path, origin: Origin) -> None:
        self._store, self._module, self._config, self._folder = store, module, config, out_dir
        self._origin = origin
        chosen, self._held_out = split(store.samples, config.held_out)
        if not chosen:
            raise UsageError("there is no sample to train on: all are held out, or shorter than 3 tokens")
        self._plan: list[list[int]] = []
        for epoch in range(config.epochs):
            self._plan += batches(store.samples, chosen, config.batch_tokens, seed=config.seed * 10_007 + epoch)
        self._optimizers = Optimizers(module, config.weight_decay)
        self._peak = config.peak(module.target.config.hidden_size)
        self._reader = ThreadPoolExecutor(1)
        self._last_saved = time.monotonic()
        self.progress = _Progress(0, None, Curves(module.method))

    @property
    def updates(self) -> int:
        return len(self._plan)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def prepare(self) -> None:
        """What comes before the first update."""
        if self.progress.update == 0:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(self._config.seed)
                self._module.prepare(self._read_ahead(self._plan[: -(-_FIRST_LOOK // self._config.batch_tokens)]))
            self.measure_if_due()

    # -- learning -----------------------------------------------------------------------------------------------------

    def upcoming(self) -> Iterator[Batch]:
        """The batches that are left, each read while the one before is learned from."""
        return self._read_ahead(self._plan[self.progress.update :])

    def learn(self, batch: Batch) -> dict[str, str]:
        """One update. Returns what to show beside the progress bar."""
        p = self.progress
        outcome = self._module.loss(batch, self._config.goal)
        if not outcome.loss.isfinite():
            raise UsageError("the loss is no longer a number; start anew with a smaller learning rate")
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        self._optimizers.step(self._peak * self._config.rate(p.update, self.updates), self._config.clip)
        p.update += 1
        p.tally = outcome.tally if p.tally is None else p.tally + outcome.tally
        if p.update % max(self.updates // _POINTS, 1) == 0:
            p.curves.train.append(point(p.update, p.tally))
            p.tally = None
        last = (p.curves.train or [point(p.update, outcome.tally)])[-1]
        return {"loss": f"{last['loss']:.3f}", "acceptance": f"{last['acceptance_length']:.2f}"}

    def measure_if_due(self) -> None:
        """Measure the held-out samples before the first update, after the last, and evenly between."""
        p, count = self.progress, self._config.measurements
        due = p.update * count // self.updates > (p.update - 1) * count // self.updates
        measured = p.curves.held_out and p.curves.held_out[-1]["update"] == p.update
        if not self._held_out or not due or measured:
            return
        total: Tally | None = None
        with torch.no_grad():
            for batch in self._held_out_batches():
                tally = self._module.loss(batch, self._config.goal).tally
                total = tally if total is None else total + tally
        assert total is not None
        p.curves.held_out.append(point(p.update, total))
        p.curves.write(self._folder)

    def _held_out_batches(self) -> Iterator[Batch]:
        return self._read_ahead(in_order(self._store.samples, self._held_out, self._config.batch_tokens))

    def _read_ahead(self, plan: Sequence[Sequence[int]]) -> Iterator[Batch]:
        following = self._reader.submit(self._read, plan[0]) if plan else None
        for number in range(len(plan)):
            assert following is not None
            batch = following.result()
            following = self._reader.submit(self._read, plan[number + 1]) if number + 1 < len(plan) else None
            yield batch

    def _read(self, numbers: Sequence[int]) -> Batch:
        samples = list(self._store.read_many(numbers))
        return collate(samples, self._module.feature_layers, self._module.last_layer)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def finish(self) -> Curves:
        """Write the drafter and the curves, and a last checkpoint: the same command has nothing left to do then."""
        curves = self.progress.curves
        curves.write(self._folder)
        measured = tuple(curves.held_out[-1]["accuracy"]) if curves.held_out else ()
        with torch.no_grad():
            ranked = self._module.accept_by_rank(self._held_out_batches()) if self._held_out else ()
        save_head(replace(self._module.to_head(), accept_by_depth=measured, accept_by_rank=ranked), self._folder)
        self.save()
        return curves

    def save_if_due(self) -> None:
        """A checkpoint every few minutes, and a last one when the disk is nearly full, which ends the run."""
        try:
            check_room(self._folder, 0)
        except DiskFullError:
            self.save()
            raise
        if time.monotonic() - self._last_saved >= 60 * self._config.checkpoint_minutes:
            self.save()

    def save(self) -> None:
        p = self.progress
        checkpoint.write(
            self._folder,
            {
                "config": asdict(self._config),
                "origin": asdict(self._origin),
                "drafter": _kind(self._module),
                "data": data_digest(self._store.samples),
                "module": self._module.state_dict(),
                "optimizers": self._optimizers.state_dict(),
                "update": p.update,
                "tally": None if p.tally is None else asdict(p.tally),
                "curves": asdict(p.curves),
            },
        )
        self._last_saved = time.monotonic()

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        state = checkpoint.read(self._folder)
        if state is None:
            return
        _check_same(state, self._folder, self._store.samples, self._module, self._config, self._origin)
        self._module.load_state_dict(state["module"])
        self._optimizers.load_state_dict(state["optimizers"])
        tally = None if state["tally"] is None else Tally(**state["tally"])
        self.progress = _Progress(state["update"], tally, Curves(**state["curves"]))


def check_resumable(
    folder: Path, samples: Sequence[Sample], module: DrafterModule, config: TrainConfig, origin: Origin
) -> None:
    """Raise what `train` raises if the checkpoint in ``folder`` is of something else: known before hidden states
    are computed.
    """
    state = checkpoint.read(folder)
    if state is not None:
        _check_same(state, folder, samples, module, config, origin)


def _check_same(
    state: Mapping[str, Any],
    folder: Path,
    samples: Sequence[Sample],
    module: DrafterModule,
    config: TrainConfig,
    origin: Origin,
) -> None:
    anew = f"go on with what {folder / checkpoint.NAME} was made with, or start anew with --restart"
    if state["drafter"] != _kind(module):
        raise ConfigError(f"the checkpoint is of another drafter or target; {anew}")
    for name, value in asdict(config).items():
        if name not in _FREE_TO_RESUME and state["config"].get(name) != value:
            raise ConfigError(f"{name}={value!r}, but the checkpoint has {state['config'].get(name)!r}; {anew}")
    began = state.get("origin", {})
    if began.get("target") != origin.target:
        raise ConfigError(f"the checkpoint is of a target with other weights, or run in another way; {anew}")
    if began.get("drafter") != origin.drafter:
        raise ConfigError(f"the checkpoint began with another drafter; {anew}")
    if state["data"] != data_digest(samples):
        raise UsageError(f"the checkpoint is of other samples; {anew}")


def _kind(module: DrafterModule) -> str:
    """What tells one kind of drafter from another."""
    ids = None if module.draft_ids is None else digest(module.draft_ids.tolist()).hex()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]
    return repr((module.method, module.dtype, module.feature_layers, module.target.config, ids, shapes))
