"""`python -m titanish.train --job.config_file FILE [--section.key=value ...]`: one rank of a training job.

The order is by cost of a mistake: configuration, then data, both without torch, then torch and the process
group. That is why torch's part is imported inside a function here and nowhere else in the package.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from titanish.config.load import Loaded, load_config
from titanish.config.render import to_toml
from titanish.config.report import summary
from titanish.config.schema import Config
from titanish.data.build import Prepared, prepare_data
from titanish.errors import ConfigError, TitanishError
from titanish.models.registry import resolve_size
from titanish.observe.events import Events
from titanish.parallel.dims import tp_spans_nodes
from titanish.runtime.folder import claimed
from titanish.runtime.launcher import end_with_launcher, launcher_number
from titanish.runtime.log import report_failure, set_place, setup_logging
from titanish.runtime.stop import StopRequests
from titanish.train.failing import LostRankError, how_to_go_on, in_words, wait_for_turn

logger = logging.getLogger("titanish")

RECORD = "# Every setting of a run, as titanish resolved it.\n"


def main(arguments: list[str]) -> int:
    """Train as `arguments` say; returns the exit code."""
    stop = StopRequests()
    with stop.listening():
        return _main(arguments, stop)


def _main(arguments: list[str], stop: StopRequests) -> int:
    rank = local_rank = 0
    try:
        rank = launcher_number("RANK", 0)
        local_rank = launcher_number("LOCAL_RANK", 0)
        setup_logging(rank)
        end_with_launcher()
        loaded = load_config(
            None,
            arguments,
            world_size=launcher_number("WORLD_SIZE", 1, low=1),
            resolve_size=resolve_size,
            at_start=True,
        )
    except TitanishError as error:
        wait_for_turn(local_rank)
        report_failure(error)
        return 1
    try:
        _train(loaded, stop)
    except BaseException as error:
        _fail(in_words(error), loaded, stop, rank, local_rank)
        _leave(failed=True)
        return 1
    _leave(failed=False)
    return 0


def _fail(error: BaseException, loaded: Loaded, stop: StopRequests, rank: int, local_rank: int) -> None:
    """Report the error that ends this rank, and once what it means for the next start."""
    config, training = loaded.config, stop.deferring
    lost = isinstance(error, LostRankError)
    if lost:  # the launcher ends this rank now, but its trace is of use
        stop.say_last_words()
        report_failure(error)
        _write_trace(config, rank)
    else:
        stop.end_at_once("after an error")
        wait_for_turn(local_rank)
        report_failure(error)
    if training and (rank == 0 or not lost):
        with suppress(OSError):  # a folder that cannot be read may well be the error
            logger.error(how_to_go_on(config.job.dump_folder, config.checkpoint))


def _train(loaded: Loaded, stop: StopRequests) -> None:
    config = loaded.config
    prepared = prepare_data(
        config.training,
        config.validation,
        config.model,
        vocab_size=loaded.size.vocab_size,
        seed=config.debug.seed,
    )
    from titanish.generate.sample import encode_prompt
    from titanish.runtime.device import select_device
    from titanish.runtime.process_group import read_ranks, restarts_fail, start_process_group
    from titanish.runtime.traces import record_collectives
    from titanish.train.assemble import assemble, start_mesh
    from titanish.train.job import run

    if config.sample.enable:
        encode_prompt(prepared.tokenizer, config.sample.prompt, loaded.size.vocab_size)
    ranks = read_ranks()
    setup_logging(ranks.rank, disable_color=config.metrics.disable_color_printing)
    device = select_device(ranks.local_rank)
    record_collectives(config.comm.trace_buf_size, _trace_prefix(config))
    start_process_group(device, config.comm.init_timeout_seconds)
    mesh = start_mesh(loaded, device)
    set_place(mesh.place)
    _announce(loaded, prepared, device.name)
    if tp_spans_nodes(mesh.degrees, ranks.local_world_size):
        logger.warning(
            f"parallelism.tensor_parallel_degree = {mesh.degrees.tp} spans nodes of "
            f"{ranks.local_world_size} ranks: every layer waits for the network; "
            f"a degree that divides {ranks.local_world_size} does not"
        )
    if (why := restarts_fail()) and ranks.rank == 0:
        logger.warning(why)
    with claimed(Path(config.job.dump_folder)) if ranks.rank == 0 else nullcontext():
        if ranks.rank == 0:
            _write_config(loaded)
        events = Events(Path(config.job.dump_folder) / "events.jsonl" if ranks.rank == 0 else None)
        try:
            job = assemble(loaded, prepared, device, mesh, events, stop)
            if job.state.step >= job.steps:
                logger.info(f"step {job.state.step} is done already; raise training.steps above it to go on")
            run(job)
            stop.end_at_once("after the last step")
            if config.sample.enable and job.state.stop is None:
                _sample(loaded, prepared, job.model, device.torch_device)
        except BaseException as error:
            known = in_words(error)
            text = str(known) if isinstance(known, TitanishError) else f"{type(error).__name__}: {error}"
            events.add("failure", events.step, error=text)
            raise
        finally:
            events.close()
        if job.state.stop is None:
            events.add("finish", job.state.step)
        else:
            logger.info(how_to_go_on(config.job.dump_folder, config.checkpoint))


def _write_trace(config: Config, rank: int) -> None:
    from titanish.runtime.traces import write_trace

    try:
        path = write_trace(_trace_prefix(config), rank)
    except OSError as error:
        logger.error(f"the trace of collectives cannot be written: {error}")
    else:
        if path is not None:
            logger.error(f"the last collectives of this rank are in {path}")


def _trace_prefix(config: Config) -> Path:
    return Path(config.job.dump_folder) / config.comm.save_traces_folder / config.comm.save_traces_file_prefix


def _announce(loaded: Loaded, prepared: Prepared, device: str) -> None:
    config = loaded.config
    logger.info(f"{config.job.description}; on {device}")
    for line in (*map(str, loaded.notes), *summary(loaded)):
        logger.info(line)
    logger.info(f"data: {prepared.train.dataset}, tokenizer {prepared.tokenizer.name}")
    if config.job.print_config:
        logger.info("\n" + to_toml(config, loaded.sources))


def _write_config(loaded: Loaded) -> None:
    """Leave the resolved configuration in the dump folder, but not over a file that somebody wrote."""
    config = loaded.config
    folder = Path(config.job.dump_folder)
    files = {source.file for source in loaded.sources.values()} | {config.job.config_file}
    read = {Path(file).resolve() for file in files if file}
    for name in ("config.toml", config.job.save_config_file):
        if name is None:
            continue
        path = (folder / name).resolve()
        if path in read and not path.read_text().startswith(RECORD):
            raise ConfigError(
                f"job.dump_folder = {config.job.dump_folder!r}: {name}, the record of this run, would "
                "replace the file that the run is read from; name another folder"
            )
        try:
            (folder / name).write_text(RECORD + to_toml(config))
        except OSError as error:
            raise TitanishError(
                f"job.dump_folder = {config.job.dump_folder!r}: {error.filename} cannot be written: "
                f"{error.strerror}; name a folder that can"
            ) from error


def _sample(loaded: Loaded, prepared: Prepared, model: Any, device: Any) -> None:
    from titanish.generate.sample import encode_prompt, sample_text
    from titanish.parallel.fsdp import release_gathered

    config = loaded.config
    logger.info(f"sampling {config.sample.max_new_tokens} tokens")
    text = sample_text(
        model,
        prepared.tokenizer,
        encode_prompt(prepared.tokenizer, config.sample.prompt, loaded.size.vocab_size),
        max_new_tokens=config.sample.max_new_tokens,
        temperature=config.sample.temperature,
        max_seq_len=config.training.seq_len,
        seed=config.debug.seed,
        device=device,
    )
    release_gathered(model)
    if text is None:
        logger.warning("the model's logits are not finite: nothing can be sampled from it")
        return
    logger.info(
        f"sampled from the trained model after {config.sample.prompt!r}:\n{config.sample.prompt}{text}"
    )


def _leave(*, failed: bool) -> None:
    if "torch" in sys.modules:
        from titanish.runtime.process_group import close

        close(failed=failed)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code:
        # Not sys.exit: what torch and Python tidy up at their end may wait for a rank that is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
