"""The commands `export`, `serve`, `score` and `parity`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.logs import Inputs
from clickfleet.cli.migrating import ConfigFile, Settings, model_and_data, paddlerec_model
from clickfleet.cli.training import Arena, Format, GraphLevel, ModelOrConfig

if TYPE_CHECKING:
    from clickfleet.config.sections import Serve


KIB, MIB = 1 << 10, 1 << 20
WAIT_POLL_S = 0.2

Token = Annotated[str | None, typer.Option(help="Bearer token of the server.", envvar="CLICKFLEET_TOKEN")]
RowFormatOption = Annotated[
    str, typer.Option(help="Format of the rows; int8 has a scale per row.", metavar="float32|float16|int8")
]
Certificate = Annotated[Path | None, typer.Option(help="PEM certificate to trust for https.", metavar="FILE")]


def add(app: typer.Typer) -> None:
    command(app)(export)
    command(app)(serve)
    command(app)(score)
    command(app)(parity)


def export(
    model: ModelOrConfig = None,
    out: Annotated[
        Path | None,
        typer.Argument(
            help="Folder to create (default for a PaddleRec configuration: inference in its model_save_path).",
            metavar="OUT",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="Columns that requests contain (default: all of the schema).", metavar="NAME,NAME,..."),
    ] = None,
    outputs: Annotated[
        str,
        typer.Option(
            help="Values that replies contain: score, logit (each with a value per label), or layers of the network.",
            metavar="NAME,NAME,...",
        ),
    ] = "score,logit",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export of that name.")] = False,
    layout: Annotated[
        str,
        typer.Option(
            help="What to write: artifact (for clickfleet serve), or paddle-text (part-000-00000 and dnn_plugin of PaddleRec).",
            metavar="artifact|paddle-text",
        ),
    ] = "artifact",
    parts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Files per table of paddle-text: shard_num of its readers (default: 1).",
            metavar="N",
        ),
    ] = None,
    rows: RowFormatOption = "float32",
    config_file: ConfigFile = None,
    option: Settings = None,
    trust: Trust = False,
) -> Result:
    """Write a model for serving: its rows, its network as ONNX, its schema, and requests with known replies.

    With `--layout paddle-text`, write it for consumers of PaddleRec's files. Of a published log, each entry since its newest base
    becomes a folder in OUT.

    Example: `clickfleet export run artifact`
    """
    from clickfleet.store import run_folder

    if layout not in ("artifact", "paddle-text"):
        raise typer.BadParameter("--layout must be artifact or paddle-text")
    if rows not in ("float32", "float16", "int8"):
        raise typer.BadParameter("--rows must be float32, float16 or int8")
    as_text = layout == "paddle-text"
    if as_text and (inputs is not None or outputs != "score,logit"):
        raise typer.BadParameter("--inputs and --outputs are for an artifact; paddle-text has the whole model")
    if as_text and rows != "float32":
        raise typer.BadParameter("--rows is for an artifact; paddle-text has numbers as text")
    if not as_text and parts is not None:
        raise typer.BadParameter("--parts needs --layout paddle-text")
    translation = paddlerec_model(model, [] if out is None else [str(out)], config_file, option)
    if translation is not None:
        from clickfleet.paddlerec import models

        translated, others = translation
        folder = Path(others[0]) if others else Path(translated.config.run.dir) / "inference"
        if as_text:
            with models.model_of_epoch(translated, translated.last_epoch) as path:
                return _export_text(path, folder, parts or 1, trust, overwrite)
        with models.model_of_epoch(translated, translated.last_epoch) as path:
            wanted = inputs or ",".join(translated.inputs) or None
            return _export(path, folder, wanted, outputs, trust, overwrite, rows)
    if model is None or out is None:
        raise typer.BadParameter("Missing argument 'OUT'.")
    path = run_folder.resolve(model)
    say(f"model: {run_folder.describe(path)}")
    if as_text:
        return {**_export_text(path, out, parts or 1, trust, overwrite), "checkpoint": str(path)}
    return {**_export(path, out, inputs, outputs, trust, overwrite, rows), "checkpoint": str(path)}


def _export_text(path: Path, out: Path, parts: int, trust: bool, overwrite: bool) -> Result:
    from clickfleet.paddlerec.exporting import export_text

    done = export_text(path, out, parts, trust, overwrite)
    for one in done:
        say(one.text())
    for note in done[0].notes:
        say(note)
    return {"path": str(out), "parts": parts, "exported": [one.to_dict() for one in done]}


def _export(path: Path, out: Path, inputs: str | None, outputs: str, trust: bool, overwrite: bool, rows: str) -> Result:
    from clickfleet.store import run_folder
    from clickfleet.training import export as exporting
    from clickfleet.training import saving

    learner = saving.load(path, trust)
    names = [column.name for column in (*learner.schema.columns, *learner.schema.histories)]
    wanted = names if inputs is None else inputs.split(",")
    entry = exporting.export(
        learner,
        out,
        run_folder.step(path),
        None if wanted == names else wanted,
        outputs.split(","),
        run_folder.read_names(path, learner.schema) if learner.config.run.names else None,
        overwrite,
        rows,  # type: ignore[arg-type]
    )
    facts = entry.manifest
    say(f"{out}: {learner.config.model.name} of step {facts['step']:,}, {facts['rows']:,} rows, {entry.size:,} bytes")
    if entry.row_format != "float32":
        say(entry.describe_rows())
    return {
        "path": str(out),
        "rows": facts["rows"],
        "bytes": entry.size,
        "row_format": entry.row_format,
        "row_bytes": entry.row_bytes,
        "golden_drift": entry.info.get("golden_drift"),
        "step": facts["step"],
        "inputs": wanted,
        "outputs": facts["outputs"],
        "hash": entry.hash,
    }


def serve(
    model: Annotated[
        Path,
        typer.Argument(
            help="An artifact of `clickfleet export`, a published log, or a run folder with one.", metavar="MODEL"
        ),
    ],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for HTTP; 0 selects a free one (default: 8080).")
    ] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=-1, max=65535, help="Port for gRPC; 0 selects a free one, -1 disables gRPC (default: 8081)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of processes that share the socket (default: 1).")
    ] = None,
    rows: Annotated[
        str,
        typer.Option(
            help="Where rows are read from: mapped (files shared by all workers), memory, or a redis:// URL.",
            metavar="mapped|memory|URL",
        ),
    ] = "mapped",
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests (default: the name of the network).")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Inference engine: onnx (default), int8, or a provider of ONNX Runtime such as CUDA.", metavar="NAME"
        ),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Short for --engine int8: quantise the network, and measure and show the drift."),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per run of the network, in every worker (default: 1).")
    ] = None,
    graph_optimization: GraphLevel = None,
    arena: Arena = None,
    max_queue_ms: Annotated[
        float | None,
        typer.Option(
            help="Reject requests with 503 if the expected wait is longer, in ms (default: 50).", metavar="MS"
        ),
    ] = None,
    max_time_ms: Annotated[
        float, typer.Option(help="Time limit of a request in ms; a client may set a shorter one.", metavar="MS")
    ] = 5000.0,
    max_body: Annotated[int, typer.Option(help="Maximum size of a body in bytes.", metavar="BYTES")] = 16 * MIB,
    max_rows: Annotated[int, typer.Option(help="Maximum number of rows per request.")] = 10000,
    max_candidates: Annotated[int, typer.Option(help="Maximum number of candidates per ranking request.")] = 10000,
    max_header_bytes: Annotated[
        int,
        typer.Option(
            min=1024,
            help="Maximum size of the request line and headers, or of gRPC metadata, in bytes.",
            metavar="BYTES",
        ),
    ] = 32 * KIB,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Maximum open connections per worker, for HTTP and gRPC each.")
    ] = 2048,
    header_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds to receive the request line and headers, or to finish a TLS or gRPC handshake."
        ),
    ] = 10.0,
    body_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to receive a body.", metavar="SECONDS")] = 30.0,
    send_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a client to read its reply.", metavar="SECONDS")
    ] = 30.0,
    idle_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds before an idle connection is closed.", metavar="SECONDS")
    ] = 75.0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of bearer tokens, one per line, reread when it changes (or set CLICKFLEET_TOKEN).",
            metavar="FILE",
        ),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of tokens for /admin (or set CLICKFLEET_ADMIN_TOKEN); without a token, /admin is disabled.",
            metavar="FILE",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain for https.", metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key for https.", metavar="FILE")] = None,
    upload_dir: Annotated[
        Path | None, typer.Option(help="Folder for uploads that clients ask to keep (default: none are kept).")
    ] = None,
    results_redis: Annotated[
        str | None, typer.Option(help="redis:// URL that receives the results of /upload?re_model=redis.")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            help="Show log: write every scored row with its features to a folder or a Kafka topic (default: none).",
            metavar="FOLDER|kafka://BROKERS/TOPIC",
        ),
    ] = None,
    log_sample: Annotated[
        float | None,
        typer.Option(help="Fraction of the requests in the show log, by the hash of their ids (default: 1)."),
    ] = None,
    feedback: Annotated[
        str | None,
        typer.Option(
            help="Accept POST /v1/feedback, and write its events to a folder or a Kafka topic (default: disabled).",
            metavar="FOLDER|kafka://BROKERS/TOPIC",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the server's working files, such as merged deltas (default: a temporary folder)."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the first base of MODEL if it is not published yet.")
    ] = False,
    no_batching: Annotated[
        bool, typer.Option("--no-batching", help="Score every request alone, for comparison.")
    ] = False,
) -> Result:
    """Serve a model over HTTP and gRPC. A published log is followed while it grows.

    Options that are not given come from the section `serve` of the run that the log belongs to.

    Example: `clickfleet serve run --port 8080 --workers 2`
    """
    from clickfleet.errors import ConfigError
    from clickfleet.serve import supervisor
    from clickfleet.store.onnx import Engine

    def text(path: Path | None) -> str | None:
        return None if path is None else str(path.resolve())

    def place(given: str | None, default: str | None) -> str | None:
        return default if given is None else given if "://" in given else str(Path(given).resolve())

    if wait:
        wait_for_base(model)
    path = find_model(model)
    defaults = serve_section(path)
    if "torch" in (engine, defaults.engine) or (int8 and engine not in (None, "int8")):
        raise ConfigError(
            "a server uses exactly one engine of ONNX Runtime", "choose --engine onnx, int8 or a provider"
        )
    grpc = defaults.grpc_port if grpc_port is None else grpc_port
    settings = supervisor.Settings(
        model=str(path),
        state=text(state) or "",
        host=host or defaults.host,
        port=defaults.port if port is None else port,
        grpc_port=None if grpc is None or grpc < 0 else grpc,
        workers=workers or defaults.workers,
        rows=rows,
        name=name,
        engine=Engine(
            "int8" if int8 else engine or defaults.engine,
            threads or defaults.threads,
            graph_optimization or defaults.graph_optimization,
            defaults.arena if arena is None else arena,
        ),
        batching=not no_batching,
        max_queue_ms=defaults.max_queue_ms if max_queue_ms is None else max_queue_ms,
        max_time_ms=max_time_ms,
        max_body=max_body,
        max_rows=max_rows,
        max_candidates=max_candidates,
        max_header_bytes=max_header_bytes,
        max_connections=max_connections,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        send_timeout_s=send_timeout,
        idle_timeout_s=idle_timeout,
        token_file=text(token_file) or defaults.token_file,
        admin_token_file=text(admin_token_file),
        tls_cert=text(tls_cert),
        tls_key=text(tls_key),
        upload_dir=text(upload_dir),
        results_redis=results_redis,
        log=place(log, defaults.log),
        log_sample=defaults.log_sample if log_sample is None else log_sample,
        log_every_s=defaults.log_every,
        feedback=place(feedback, defaults.feedback),
        log_rotate_bytes=defaults.log_rotate_size,
        log_rotate_s=defaults.log_rotate_every,
        kafka_options=defaults.kafka_options,
    )
    result: Result = {}

    def ready(server: supervisor.Supervisor) -> None:
        calls = f", gRPC {server.settings.host}:{server.settings.grpc_port}" if server.settings.grpc_port else ""
        say(
            f"ready: {server.address}{calls}  ({settings.workers} worker{'s' if settings.workers > 1 else ''}; Ctrl-C stops)"
        )
        if settings.log is not None:
            say(
                f"show log: {settings.log}"
                + (f", {settings.log_sample:g} of the requests" if settings.log_sample < 1 else "")
            )
        if settings.feedback is not None:
            say(f"feedback: {settings.feedback}")
        result.update(url=server.address, grpc_port=server.settings.grpc_port)

    supervisor.run(settings, say, ready)
    return result


def serve_section(published: Path) -> "Serve":
    """Return the section `serve` of the run that wrote a published log; the defaults for an artifact."""
    from clickfleet.config.load import load
    from clickfleet.config.sections import Serve
    from clickfleet.store.published import LOG

    config = published.parent / "config.yaml"
    return load(config, (), config.parent).serve if (published / LOG).is_file() and config.is_file() else Serve()


def wait_for_base(model: Path) -> None:
    """Wait until a published log has its first base. A signal ends the process."""
    import time

    from clickfleet.store.published import LOG, Log

    said = False
    while True:
        for folder in (model, model / "published"):
            if (folder / LOG).is_file() and any(line.kind == "base" for line in Log(folder).kept()):
                return
        if is_served(model):
            return
        if not said:
            say(f"waiting for the first base in {model} …")
            said = True
        time.sleep(WAIT_POLL_S)


def is_served(model: Path) -> bool:
    """Return whether a path is an artifact or an entry, which is complete."""
    from clickfleet.store import atomic

    return (model / atomic.MANIFEST).is_file()


def find_model(model: Path) -> Path:
    """Resolve MODEL to an entry, a published log, or the published log of a run folder."""
    from clickfleet.errors import ServeError
    from clickfleet.store.published import LOG

    for path in (model, model / "published"):
        if (path / LOG).is_file():
            return path.resolve()
    if is_served(model):
        return model.resolve()
    raise ServeError(
        f"{model} is neither an artifact nor a published log", f"export one: clickfleet export {model} artifact"
    )


def score(
    url: Annotated[str, typer.Argument(help="Address of the server, http://host:port.", metavar="URL")],
    data: Inputs,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per request.")] = 5,
    protocol: Annotated[
        str,
        typer.Option(
            help="Protocol: http (binary tensors), grpc, or upload (unparsed lines).", metavar="http|grpc|upload"
        ),
    ] = "http",
    format: Format = None,  # noqa: A002
    grpc_address: Annotated[
        str | None,
        typer.Option(help="Address for gRPC (default: the host of URL, the port after its port).", metavar="HOST:PORT"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after N rows (default: all rows).", metavar="N")
    ] = None,
    token: Token = None,
    certificate: Certificate = None,
    trust: Trust = False,
) -> Result:
    """Send files to a server and print the scores of each batch, with the milliseconds measured by client and server.

    Example: `clickfleet score http://127.0.0.1:8080 log/test --limit 100`
    """
    from clickfleet.serve.client import score_files

    def show(number: int, scores: list[float] | dict[str, list[float]], client_ms: float, server_ms: float) -> None:
        def text(values: list[float]) -> str:
            return " ".join(f"{value:.7g}" for value in values)

        values = text(scores) if isinstance(scores, list) else "; ".join(f"{k} {text(v)}" for k, v in scores.items())
        say(f"batch {number}: {values}  client {client_ms:.3f} ms, server {server_ms:.3f} ms")

    done = score_files(
        url,
        data,
        show,
        batch_size=batch_size,
        protocol=protocol,
        form=format,
        grpc_address=grpc_address,
        limit=limit,
        token=token,
        certificate=None if certificate is None else str(certificate),
        trust=trust,
    )
    say(
        f"{done['rows']:,} rows in {done['batches']:,} requests, p50 {done['p50_ms']:.3f} ms, p99 {done['p99_ms']:.3f} ms"
    )
    return done


def parity(
    model: ModelOrConfig = None,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Data to score offline and online (default for a PaddleRec configuration: its test data).",
            metavar="DATA",
            show_default=False,
        ),
    ] = None,
    server: Annotated[str | None, typer.Option(help="Address of a server of this model.", metavar="URL")] = None,
    artifact: Annotated[
        Path | None,
        typer.Option(help="Exported artifact whose rows, weights and graph are compared.", metavar="FOLDER"),
    ] = None,
    redis: Annotated[str | None, typer.Option(help="redis:// URL whose rows are compared.", metavar="URL")] = None,
    format: Format = None,  # noqa: A002
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows of DATA to compare.")] = 10000,
    sample: Annotated[int, typer.Option(min=0, help="Number of table rows to compare; 0: all.")] = 0,
    token: Token = None,
    certificate: Certificate = None,
    config_file: ConfigFile = None,
    option: Settings = None,
    trust: Trust = False,
) -> Result:
    """Check that online equals offline: settings, scores, rows, weights and graph. Report the first step that differs.

    Example: `clickfleet parity run log/test --server http://127.0.0.1:8080`
    """
    from clickfleet.workbench.parity import check_parity

    with model_and_data(model, data or [], config_file, option, trust) as (saved, files):
        report = check_parity(
            saved,
            server,
            files,
            form=format,
            artifact=artifact,
            redis=redis,
            limit=limit,
            sample=sample,
            token=token,
            certificate=None if certificate is None else str(certificate),
            trust=trust,
        )
    say(f"model: {report.model}")
    for check in report.checks:
        say(f"{'ok  ' if check.ok else 'DIFF'}  {check.name}: {check.detail}")
    return report.to_dict()
