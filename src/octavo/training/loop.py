"""The training loop: ``train(config, run_dir, data=…)``.

One update: gradients of ``grad_accumulation`` micro-batches, each batch a function of (seed, step); clip; AdamW;
close the delayed recipes' step. Loss and gradient norm are checked before the weights change, so that a run stops
with the weights of the last good step. Everything a step depends on is in the checkpoint or in the configuration, so a
resumed run writes the same metrics.jsonl as an uninterrupted one, bit for bit except for the times, if it uses the same
number of threads, on which the order of some sums depends.

On several ranks each computes its part of the micro-batches, by DDP or FSDP2, and the first one writes the files. An
update is the same function of the configuration whatever their number, except for the order of sums over ranks.

With a loss scale, a step whose gradients overflow is repeated with half the scale on the same batches: no text is
skipped, the number of updates stays, and delayed scaling discards the amaxes of the failed attempt. In FP32, only the
scale differs from a run without overflow. A gradient norm that overflows although every element is finite stops the
run, because a smaller loss scale does not help.
"""

import math
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.doctor import StepNotes
from octavo.doctor.capture import remove_captures
from octavo.errors import NonFiniteLossError
from octavo.models import Llama
from octavo.nn.scaling_state import discard_step, rescale_gradient_history, update_scales
from octavo.nn.tensor_parallel import whole
from octavo.parallel.data_parallel import synchronizing
from octavo.parallel.heartbeat import Heartbeat
from octavo.parallel.ranks import ALONE, Ranks
from octavo.text.tokens import TokenData
from octavo.training.autopilot import Autopilot
from octavo.training.branching import begin_from
from octavo.training.checkpoint import CheckpointState, load_checkpoint, snapshot
from octavo.training.checkpoint_saver import CheckpointSaver
from octavo.training.config import RunConfig
from octavo.training.evaluate import evaluate, token_loss
from octavo.training.events import Evaluated, Notice, OnEvent, StepDone
from octavo.training.gradient_jump import divide_gradients
from octavo.training.memory import fitting_in_memory, peak_memory_bytes, reset_peak_memory
from octavo.training.metrics import Log, MetricsLog, NoLog, lines_up_to
from octavo.training.nonfinite import failure_sentence, failure_values, first_nonfinite, last_good_checkpoint
from octavo.training.precision import apply_recipe, resolve_device, surroundings
from octavo.training.rank_layout import (
    check_same_checkpoint,
    check_same_run,
    check_same_state,
    check_same_step,
    gradient_reduction,
    on_ranks,
    sharing_loss,
)
from octavo.training.result import TrainResult, curves_of
from octavo.training.run_folder import CAPTURES, claimed, resumable_state
from octavo.training.schedules import learning_rate
from octavo.training.setup import build_loss_scaler, build_model, build_optimizer, build_watcher, check_data
from octavo.training.signals import StopRequest, stopping_on_signals
from octavo.training.threads import using_threads

__all__ = ["Trainer", "train"]


def train(
    config: RunConfig,
    run_dir: str | Path,
    *,
    data: TokenData,
    resume: bool = False,
    start: Path | None = None,
    on_event: OnEvent | None = None,
) -> TrainResult:
    """Train a decoder, or continue training it; on all ranks of the default process group, if there is one.

    Args:
        config: what to train and how.
        run_dir: the run's folder, the same on all ranks; must be new unless ``resume``.
        data: the token files to train on.
        resume: continue from the newest checkpoint of the run in ``run_dir``.
        start: a checkpoint of another run at which this new run begins (:mod:`octavo.training.branching`).
        on_event: called with each :data:`octavo.training.events.Event`.

    Raises:
        ConfigError: a logger's library is not installed.
        ConfigError: the folder holds a run, or with ``resume`` none or another one; the device is not available; or the
            model or a micro-batch does not fit in memory. A new run without any step is removed again.
        ConfigError: ranks have other configurations, versions or checkpoints, or their number does not fit.
        TrainingError: the folder cannot be written, or another process trains in it.
        DataError: a split is shorter than the context.
        CheckpointError: a checkpoint is damaged, belongs to another model, or cannot be written.
        NonFiniteLossError: the loss or a gradient became NaN or infinite.
    """
    folder, training = Path(run_dir), config.training
    ranks = Ranks.current(tensor=config.parallel.tensor)
    check_same_run(ranks, config, data)
    check_data(data, config)
    model, converted = build_model(config, data.vocab_size)  # an error here leaves no run behind
    begin = None if start is None else partial(begin_from, start, config, folder, model=model, data=data)
    with (
        claimed(folder, config, data, resume=resume, begin=begin) if ranks.is_first else nullcontext(),
        using_threads(training.threads),
        stopping_on_signals() as stop,
        sharing_loss(ranks),
        fitting_in_memory(training),
    ):
        ranks.wait()  # for the folder to be claimed
        emit = on_event or (lambda _: None)
        trainer = Trainer(config, folder, model, data=data, on_event=emit, converted=converted, ranks=ranks)
        return trainer.run(stop)


class Trainer:
    """One training run: model, optimizer, data and folder.

    Args:
        config: what to train and how.
        run_dir: a folder that this process has claimed; its newest checkpoint, if any, is continued.
        model: the model of ``build_model``.
        data: the token files.
        on_event: called with each event.
        converted: number of linears converted to the FP8 recipe.
        ranks: ranks that train together, each with a trainer.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        model: Llama,
        *,
        data: TokenData,
        on_event: OnEvent,
        converted: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.run_dir, self.data, self.ranks = config, run_dir, data, ranks
        self.model, self.emit, self.converted = model, on_event, converted
        self.micro_batches = config.parallel.micro_batches(config.training.grad_accumulation, ranks.size)
        self.reduction = gradient_reduction(config, ranks)
        self.forward = on_ranks(model, config, ranks, self.reduction)
        self.stop = StopRequest()
        self.stopped_by: str | None = None
        resumed = resumable_state(run_dir, config, data)
        check_same_checkpoint(ranks, None if resumed is None else resumed[0])
        self.step = 0 if resumed is None else resumed[1].step
        self.autopilot = Autopilot(config, lines_up_to(run_dir, self.step)) if config.training.autopilot else None
        self.training = config.training if self.autopilot is None else self.autopilot.training
        self.recipe = self.training.recipe_at(self.step)
        self.device = resolve_device(self.training.device)
        self.surroundings = surroundings(self.training, self.device, self.model)
        self.optimizer = build_optimizer(self.model, self.training)
        self.scaler = build_loss_scaler(self.training, self.device)
        self.checkpoint = None if resumed is None else self._continue_from(resumed[0])
        self.watcher = build_watcher(self.training, self.model, self.optimizer, run_dir if ranks.is_first else None)
        self.step_seconds: list[float] = []
        layers = {f"model.layers.{index}": layer for index, layer in enumerate(model.model.layers)}
        self.heartbeat = Heartbeat(ranks, layers)
        self.saver = CheckpointSaver(
            run_dir,
            self.emit,
            keep_last=self.training.keep_checkpoints,
            is_async=self.training.async_checkpoints,
            ranks=ranks,
        )

    def run(self, stop: StopRequest) -> TrainResult:
        """Train to the last step, or to the end of the step in which ``stop`` is requested."""
        self.stop = stop
        reset_peak_memory(self.device)
        with closing(self.open_log()) as log, self.saver, self.heartbeat:
            if self.checkpoint is None:
                self._evaluate(log)
            else:
                self.emit(Notice(text=f"continuing after step {self.step} of {self.training.steps}"))
            self.model.train()
            while self.step < self.training.steps and not self._is_stopping():
                self.train_step(log)
                if self._is_due(self.training.eval_interval):
                    self._evaluate(log)
                if self._is_due(self.training.checkpoint_interval) or self._is_stopping():
                    self._save(log)
        self.ranks.wait()  # for the last lines
        return self._result()

    def train_step(self, log: Log) -> None:
        """Take one update and write it to ``log``, with statistics for the doctor if they are due.

        Raises:
            NonFiniteLossError: the loss or a gradient became NaN or infinite; the weights are unchanged.
        """
        self._enter_phase(log)
        while not self._update_sampled(log):
            discard_step(self.model)  # the autopilot changed the settings; repeat the step with them
        if self.watcher is not None and self.watcher.is_due(self.step):
            self._let_autopilot_act(log, self.step)

    def _update_sampled(self, log: Log) -> bool:
        """Take one update while the doctor samples it; return False if it broke and the autopilot reacted.

        Raises:
            NonFiniteLossError: the update broke and the settings stay.
        """
        if self.reduction is not None:
            self.reduction.measures = self.watcher is not None and self.watcher.is_due(self.step + 1)
        with self._sampled(log) as notes:
            loss, grad_norm = self._update_once(log)
            notes.loss, notes.values["grad_norm"] = loss, grad_norm
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return True
        error = self._nonfinite(log, loss, grad_norm)
        if not self._let_autopilot_act(log, self.step + 1):
            raise error
        return False

    def _update_once(self, log: Log) -> tuple[float, float]:
        """Forward, backward, clip and optimizer step, unless the loss or the gradients' norm is not finite.

        Returns:
            The loss, and the gradients' norm before clipping.
        """
        started = time.perf_counter()
        lr = self._learning_rate()
        loss, grad_norm, overflowed = self._gradients()
        while overflowed and math.isfinite(loss) and self._lower_loss_scale(log):
            loss, grad_norm, overflowed = self._gradients()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            loss_scale = self._update()
            self.step += 1
            self._report_step(log, loss, lr, grad_norm, seconds=time.perf_counter() - started, loss_scale=loss_scale)
            check_same_state(self.ranks, self.model, self.config.parallel, step=self.step)
        return loss, grad_norm

    def _learning_rate(self) -> float:
        training = self.training
        lr = learning_rate(
            self.step + 1,
            peak=training.peak_lr,
            floor=min(training.min_lr, training.peak_lr),
            warmup=training.warmup_steps,
            steps=training.steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        return lr

    def _gradients(self) -> tuple[float, float, bool]:
        """Fill the parameters' gradients, clipped.

        Returns:
            The mean loss, the gradients' norm before clipping, and whether a scaled gradient overflowed.
        """
        self.optimizer.zero_grad(set_to_none=True)
        jump = self.training.jump_at(self.step + 1)
        share = jump / self.training.grad_accumulation
        losses = []
        for index, (inputs, targets) in enumerate(self._batches()):
            with self._synchronizing(now=index == self.micro_batches - 1):
                self.heartbeat.enter(f"step {self.step + 1}, forward")
                with self.surroundings:
                    loss = token_loss(self.forward(inputs), targets)
                part = loss * share
                self.heartbeat.enter(f"step {self.step + 1}, backward")
                (part if self.scaler is None else self.scaler.scale(part)).backward()
            losses.append(loss.detach())
        self.heartbeat.enter(f"step {self.step + 1}, after backward")
        overflowed = self.scaler is not None and not self.scaler.unscale_(self.optimizer)
        divide_gradients(self.model, jump)
        return self._mean_loss(torch.stack(losses)), self._clip(), overflowed

    def _synchronizing(self, *, now: bool) -> AbstractContextManager[object]:
        return nullcontext() if self.ranks.size == 1 else synchronizing(self.forward, now=now)

    def _mean_loss(self, losses: Tensor) -> float:
        """Return the mean loss of all ranks' micro-batches; learn with it whether a rank was told to stop.

        Raises:
            ConfigError: a rank is in another step.
        """
        number = signal.Signals[self.stop.signal_name].value if self.stop.signal_name else 0
        rows = self.ranks.gathered_numbers([*losses.tolist(), number, self.step + 1])
        check_same_step([row.pop() for row in rows])
        number = int(max(row.pop() for row in rows))
        if self.ranks.size > 1 and number:
            self.stopped_by = signal.Signals(number).name
        all_losses = torch.tensor(rows[:: self.ranks.tensor])
        return (all_losses.sum() * (1 / self.training.grad_accumulation)).item()

    def _is_stopping(self) -> bool:
        """Return whether to stop after this step; all ranks stop after the same one."""
        if self.ranks.size == 1:
            self.stopped_by = self.stop.signal_name
        return self.stopped_by is not None

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's micro-batches of the next update."""
        training = self.training
        first = self.step * training.grad_accumulation + self.ranks.data_rank * self.micro_batches
        for index in range(first, first + self.micro_batches):
            inputs, targets = self.data.batch(
                index, batch_size=training.batch_size, context=training.context, seed=training.seed
            )
            yield inputs.to(self.device), targets.to(self.device)

    def _clip(self) -> float:
        """Scale the gradients down to ``clip_norm``; return their previous norm."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self.ranks.size > 1:
            norm = whole(norm)
        if self.training.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.training.clip_norm, norm)
        return norm.item()

    def _update(self) -> float | None:
        """Take the optimizer's step; return the loss scale of its gradients, or None."""
        if self.scaler is None:
            self.optimizer.step()
            update_scales(self.model)
            return None
        loss_scale = self.scaler.value
        self.scaler.step(self.optimizer)
        update_scales(self.model)
        self.scaler.update()
        self._rescale_histories(before=loss_scale)
        return loss_scale

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.value

    def _rescale_histories(self, *, before: float) -> None:
        """Multiply the gradients' amax histories by the change of the loss scale since ``before``."""
        if self._loss_scale != before:
            rescale_gradient_history(self.model, self._loss_scale / before)

    def _lower_loss_scale(self, log: Log) -> bool:
        """After an overflow, set a smaller loss scale; return False if there is none."""
        if self.scaler is None or self.scaler.value == self.scaler.floor:
            return False
        before = self.scaler.value
        log.write("overflow", self.step + 1, loss_scale=before)
        discard_step(self.model)
        self.scaler.update()
        self._rescale_histories(before=before)
        self.emit(
            Notice(text=f"step {self.step + 1}: a gradient overflowed; the loss scale is now {self.scaler.value:g}")
        )
        return True

    def _enter_phase(self, log: Log) -> None:
        """Switch the layers to the recipe of the next step, if a phase begins with it."""
        recipe = self.training.recipe_at(self.step + 1)
        if recipe == self.recipe:
            return
        self.recipe = recipe
        apply_recipe(self.model, self.training, step=self.step + 1)
        log.write("precision", self.step + 1, recipe=recipe)
        self.emit(Notice(text=f"step {self.step + 1}: the layers run {recipe} from now on"))

    def _sampled(self, log: Log, *, always: bool = False) -> AbstractContextManager[StepNotes]:
        """Context in which the doctor samples the next step."""
        if self.watcher is None:
            return nullcontext(StepNotes())
        self.watcher.on_sample = log.write_sample
        step = self.watcher.step(self.step + 1, always=always)
        if self.autopilot is None or not self.watcher.is_due(self.step + 1):
            return step
        return self.autopilot.sampling(self.model, self.step + 1, step)

    def _let_autopilot_act(self, log: Log, step: int) -> bool:
        """Let the autopilot act on the newest sample; apply and return True if it changed the settings."""
        if self.autopilot is None or not self.autopilot.act(step, log, self.emit):
            return False
        self._capture(self.autopilot.unhealthy_layers)
        before, self.training = self.training, self.autopilot.training
        self.recipe = self.training.recipe_at(self.step)
        apply_recipe(self.model, self.training, step=self.step)
        self.surroundings = surroundings(self.training, self.device, self.model)
        self._renew_loss_scaler(keep=before.loss_scale == self.training.loss_scale)
        return True

    def _capture(self, paths: list[str]) -> None:
        """Capture the operands of layers that are about to change their recipe, with an extra micro-batch."""
        if self.watcher is None or not any(paths):
            return
        inputs, targets = next(self._batches())
        with self.watcher.capturing(paths):
            with self.surroundings:
                loss = token_loss(self.model(inputs), targets)
            (loss * (self._loss_scale / self.training.grad_accumulation)).backward()
        self.optimizer.zero_grad(set_to_none=True)
        discard_step(self.model)

    def _renew_loss_scaler(self, *, keep: bool) -> None:
        """Create a scaler for changed settings; ``keep`` the scale if its own setting is unchanged."""
        scale, scaler = self._loss_scale, self.scaler
        self.scaler = build_loss_scaler(self.training, self.device)
        if scaler is not None and self.scaler is not None and keep:
            self.scaler.load_state_dict(scaler.state_dict())
        self._rescale_histories(before=scale)

    def _nonfinite(self, log: Log, loss: float, grad_norm: float) -> NonFiniteLossError:
        with self._sampled(log, always=True):
            finding = first_nonfinite(
                self.model,
                self._batches(),
                surroundings=self.surroundings,
                loss_scale=self._loss_scale * self.training.jump_at(self.step + 1) / self.training.grad_accumulation,
                ranks=self.ranks,
            )
        scale_value = {} if self.scaler is None else {"loss_scale": self.scaler.value}
        log.write("failure", self.step + 1, **failure_values(loss, grad_norm, finding), **scale_value)
        sentence = failure_sentence(loss, grad_norm, finding)
        return NonFiniteLossError(f"at step {self.step + 1} {sentence}; {last_good_checkpoint(self.run_dir)}")

    def open_log(self) -> Log:
        """Open the log of metrics, removing lines and captures of later steps; only the first rank writes one."""
        if not self.ranks.is_first:
            return NoLog()
        remove_captures(self.run_dir / CAPTURES, after_step=self.step if self.checkpoint else -1)
        return MetricsLog(
            self.run_dir,
            after_step=self.step if self.checkpoint else None,
            loggers=self.config.training.log,
            config=self.config.flat(),
            on_line=self.autopilot.see if self.autopilot else None,
            on_notice=lambda text: self.emit(Notice(text=text)),
        )

    def _report_step(
        self, log: Log, loss: float, lr: float, grad_norm: float, *, seconds: float, loss_scale: float | None
    ) -> None:
        tokens = self.training.tokens_per_step
        self.step_seconds.append(seconds)
        values = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
        counts = {"tokens": self.step * tokens, "seconds": round(seconds, 4), "threads": torch.get_num_threads()}
        rounding = {} if self.reduction is None else self.reduction.statistics()
        scale = {} if loss_scale is None else {"loss_scale": loss_scale}
        log.write("step", self.step, **values, **counts, **scale, **rounding)
        self.emit(StepDone(step=self.step, steps=self.training.steps, **values, tokens_per_second=tokens / seconds))

    def _is_due(self, interval: int) -> bool:
        return self.step == self.training.steps or (interval > 0 and self.step % interval == 0)

    def _evaluate(self, log: Log) -> None:
        self.heartbeat.enter(f"the evaluation after step {self.step}")
        result = evaluate(
            self.model,
            self.data,
            context=self.training.context,
            max_tokens=self.training.eval_tokens or None,
            surroundings=self.surroundings,
            ranks=self.ranks,
        )
        if not math.isfinite(result.nats):
            raise NonFiniteLossError(
                f"the validation loss after step {self.step} is {result.nats}; {last_good_checkpoint(self.run_dir)}"
            )
        perplexity = result.perplexity if math.isfinite(result.perplexity) else None  # JSON has no infinity
        log.write("evaluation", self.step, nats=result.nats, perplexity=perplexity)
        self.emit(Evaluated(step=self.step, steps=self.training.steps, nats=result.nats, perplexity=result.perplexity))

    def _save(self, log: Log) -> None:
        self.heartbeat.enter(f"the save after step {self.step}")
        state = CheckpointState(
            step=self.step,
            config_hash=self.config.config_hash(),
            data_hash=self.data.content_hash,
            model=asdict(self.model.config),
            metrics=log.on_disk(),
        )
        self.saver.save(snapshot(state, model=self.model, optimizer=self.optimizer, scaler=self.scaler))

    def _continue_from(self, checkpoint: Path) -> Path:
        apply_recipe(self.model, self.training, step=self.step)
        load_checkpoint(checkpoint, model=self.model, optimizer=self.optimizer, scaler=self.scaler)
        return checkpoint

    def _result(self) -> TrainResult:
        train_curve, validation_curve = curves_of(self.run_dir)
        typical = statistics.median(self.step_seconds) if self.step_seconds else math.nan
        return TrainResult(
            run_dir=self.run_dir,
            step=self.step,
            stopped_by=self.stopped_by if self.step < self.training.steps else None,
            train_curve=train_curve,
            validation_curve=validation_curve,
            tokens_per_second=self.training.tokens_per_step / typical,
            peak_memory_bytes=peak_memory_bytes(self.device),
            checkpoint=self.saver.newest or self.checkpoint,
            converted=self.converted,
        )
