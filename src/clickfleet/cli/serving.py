"""Commands around a server: `serve`, `score`, `parity`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickfleet.cli.frame import Result, Trust, command, say
from clickfleet.cli.training import Arena, GraphLevel

if TYPE_CHECKING:
    from clickfleet.sections import Serve

KIB, MIB = 1 << 10, 1 << 20

Token = Annotated[str | None, typer.Option(help="Bearer token.", envvar="CLICKFLEET_TOKEN")]
Certificate = Annotated[Path | None, typer.Option(help="Certificate to trust for https, PEM.")]


def add(app: typer.Typer) -> None:
    command(app)(serve)
    command(app)(score)
    command(app)(parity)


def serve(
    model: Annotated[
        Path,
        typer.Argument(help="An artifact (clickfleet export), or a published log: it is followed.", metavar="MODEL"),
    ],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for HTTP; 0 takes a free one (default: 8080).")
    ] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=-1, max=65535, help="Port for gRPC; 0 takes a free one, -1 turns it off (default: 8081)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes that answer, on one socket (default: 1).")
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Where rows are read: mapped (files, shared), memory, or a redis:// URL.")
    ] = "mapped",
    name: Annotated[str | None, typer.Option(help="Name of the model in the protocols (default: its own).")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="What computes: onnx (default), int8, or a provider of ONNX Runtime such as CUDA."),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Short for --engine int8: a quantised network, its drift measured and shown.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of one run of the network, in every worker (default: 1).")
    ] = None,
    graph_optimization: GraphLevel = None,
    arena: Arena = None,
    max_queue_ms: Annotated[
        float | None, typer.Option(help="Expected wait at which requests are refused with 503 (default: 50).")
    ] = None,
    max_time_ms: Annotated[float, typer.Option(help="Longest time for a request; clients may ask for less.")] = 5000.0,
    max_body: Annotated[int, typer.Option(help="Longest body in bytes.")] = 16 * MIB,
    max_rows: Annotated[int, typer.Option(help="Most rows of a request.")] = 10000,
    max_candidates: Annotated[int, typer.Option(help="Most candidates of a ranking.")] = 10000,
    max_header_bytes: Annotated[
        int, typer.Option(min=1024, help="Longest request line and headers in bytes; metadata of a gRPC call.")
    ] = 32 * KIB,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Open connections of one worker, HTTP and gRPC each.")
    ] = 2048,
    header_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for request line and headers, and for a TLS or gRPC handshake.")
    ] = 10.0,
    body_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds in which a body must arrive.")] = 30.0,
    send_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds in which a client must read its reply.")] = 30.0,
    idle_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a connection may stay open without a request.")
    ] = 75.0,
    token_file: Annotated[
        Path | None, typer.Option(help="Bearer tokens, one per line (or CLICKFLEET_TOKEN); read again when it changes.")
    ] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(help="Tokens for /admin (or CLICKFLEET_ADMIN_TOKEN); without one it is closed.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key, PEM.")] = None,
    upload_dir: Annotated[Path | None, typer.Option(help="Folder for uploads that ask to be kept.")] = None,
    results_redis: Annotated[str | None, typer.Option(help="redis:// URL for /upload?re_model=redis.")] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for the server's own files, such as merged deltas (default: a temporary one)."),
    ] = None,
    no_batching: Annotated[bool, typer.Option("--no-batching", help="Score every request alone (to compare).")] = False,
) -> Result:
    """Serve a model over HTTP and gRPC; a published log is followed while it grows.

    What is not given here comes from the section `serve` of the run the log belongs to.
    """
    from clickfleet.engine import Engine
    from clickfleet.errors import ConfigError
    from clickfleet.serve import launch
    from clickfleet.serve.settings import Settings

    def text(path: Path | None) -> str | None:
        return None if path is None else str(path.resolve())

    path = find_model(model)
    told = section(path)
    if "torch" in (engine, told.engine) or (int8 and engine not in (None, "int8")):
        raise ConfigError(
            "a server computes by ONNX Runtime, and by one engine", "choose --engine onnx, int8 or a provider"
        )
    grpc = told.grpc_port if grpc_port is None else grpc_port
    settings = Settings(
        model=str(path),
        state=text(state) or "",
        host=host or told.host,
        port=told.port if port is None else port,
        grpc_port=None if grpc is None or grpc < 0 else grpc,
        workers=workers or told.workers,
        rows=rows,
        name=name,
        engine=Engine(
            "int8" if int8 else engine or told.engine,
            threads or told.threads,
            graph_optimization or told.graph_optimization,
            told.arena if arena is None else arena,
        ),
        batching=not no_batching,
        max_queue_ms=told.max_queue_ms if max_queue_ms is None else max_queue_ms,
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
        token_file=text(token_file) or told.token_file,
        admin_token_file=text(admin_token_file),
        tls_cert=text(tls_cert),
        tls_key=text(tls_key),
        upload_dir=text(upload_dir),
        results_redis=results_redis,
    )
    found: Result = {}

    def ready(server: launch.Fleet) -> None:
        calls = f", gRPC {server.settings.host}:{server.settings.grpc_port}" if server.settings.grpc_port else ""
        say(
            f"ready: {server.address}{calls}  ({settings.workers} worker{'s' if settings.workers > 1 else ''}; Ctrl-C stops)"
        )
        found.update(url=server.address, grpc_port=server.settings.grpc_port)

    launch.run(settings, say, ready)
    return found


def section(published: Path) -> "Serve":
    """What the run that published a log says of serving; an artifact belongs to none."""
    from clickfleet.config import load
    from clickfleet.published import LOG
    from clickfleet.sections import Serve

    config = published.parent / "config.yaml"
    return load(config, (), config.parent).serve if (published / LOG).is_file() and config.is_file() else Serve()


def find_model(model: Path) -> Path:
    """What can be served: an entry, a published log, or the log of a run folder."""
    from clickfleet import storage
    from clickfleet.errors import ServeError
    from clickfleet.published import LOG

    for path in (model, model / "published"):
        if (path / LOG).is_file():
            return path.resolve()
    if (model / storage.MANIFEST).is_file():
        return model.resolve()
    raise ServeError(
        f"{model} is neither an artifact nor a published log", f"make one: clickfleet export {model} artifact"
    )


def score(
    url: Annotated[str, typer.Argument(help="Address of a server: http://host:port.", metavar="URL")],
    data: Annotated[list[str], typer.Argument(help="Files, folders, globs or URLs; .gz and .zst are unpacked.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per request.")] = 5,
    protocol: Annotated[str, typer.Option(help="http (binary tensors), grpc, or upload (lines as they are).")] = "http",
    format: Annotated[  # noqa: A002
        str | None, typer.Option(help="Format of the files (default: that of the training data).")
    ] = None,
    grpc_address: Annotated[
        str | None, typer.Option(help="host:port for gRPC (default: the port after HTTP's).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many rows.")] = None,
    token: Token = None,
    certificate: Certificate = None,
    trust: Trust = False,
) -> Result:
    """Send files to a server; prints the scores of each batch with the client's and the server's milliseconds."""
    from clickfleet.scored import score_files

    def show(number: int, scores: list[float], client_ms: float, server_ms: float) -> None:
        values = " ".join(f"{value:.7g}" for value in scores)
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
    model: Annotated[
        Path, typer.Argument(help="A run folder, a checkpoint, a published log or entry.", metavar="MODEL")
    ],
    data: Annotated[list[str] | None, typer.Argument(help="Rows to score both ways.")] = None,
    server: Annotated[str | None, typer.Option(help="Address of a server that serves this model.")] = None,
    artifact: Annotated[
        Path | None, typer.Option(help="An exported artifact to compare rows, weights and graph with.")
    ] = None,
    redis: Annotated[str | None, typer.Option(help="redis:// URL whose rows are compared.")] = None,
    format: Annotated[  # noqa: A002
        str | None, typer.Option(help="Format of the files (default: that of the training data).")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of data to compare.")] = 10000,
    sample: Annotated[int, typer.Option(min=0, help="Rows of the table to compare; 0: every one.")] = 0,
    token: Token = None,
    certificate: Certificate = None,
    trust: Trust = False,
) -> Result:
    """Check that online equals offline: settings, scores, rows, weights, graph; names the first step that differs."""
    from clickfleet import parity as comparing

    report = comparing.compare(
        model,
        server,
        data or [],
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
