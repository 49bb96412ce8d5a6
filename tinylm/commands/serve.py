"""tinylm serve: an OpenAI-compatible server for a model."""

import time
from dataclasses import dataclass
from typing import Annotated

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions, Panel, option
from tinylm.commands.sample_options import QuantizeOptions
from tinylm.commands.trained_model_options import AdapterOption, ModelOption

EXAMPLES = """Examples:

tinylm serve -m checkpoints/helper
    A server for other programs, and a page for the browser at its address.

tinylm serve -m model.gguf --port 9000 --parallel 16
    Answer 16 requests at the same time on another port.

TINYLM_SERVE_API_KEY=secret tinylm serve --host 0.0.0.0
    Let other machines use it, with a key.
"""


@dataclass(frozen=True)
class ServerOptions:
    """The fields of ServerConfig."""

    host: Annotated[
        str, option("Address to listen on (default: 127.0.0.1, this machine only).", Panel.MACHINE, "HOST")
    ] = "127.0.0.1"
    port: Annotated[int, option("Port to listen on; 0 takes a free one (default: 8080).", Panel.MACHINE, "N")] = 8080
    api_key: Annotated[
        str | None,
        option("Key that clients must send; better given as TINYLM_SERVE_API_KEY.", Panel.MACHINE, "KEY"),
    ] = None
    parallel: Annotated[
        int, option("Requests that are computed at the same time (default: 4).", Panel.MACHINE, "N")
    ] = 4
    serving_context: Annotated[
        int | None,
        option("Tokens of a request and its answer (default: the model's context, at most 4096).", Panel.MACHINE, "N"),
    ] = None


@with_option_groups
def serve(
    model: ModelOption = None,
    adapter: AdapterOption = None,
    *,
    options: ServerOptions,
    quantize: QuantizeOptions,
    output: OutputOptions,
) -> None:
    """Serve a model to other programs (OpenAI's API) and to the browser. Ctrl-C ends the server."""
    from tinylm.models.open_generator import open_for_serving
    from tinylm.serving import ServerConfig, start_server
    from tinylm.system.process_signals import WAIT_SECONDS, end_at_next_signal

    console = output.console()
    config = ServerConfig(**vars(options))
    name, converted = open_for_serving(model, adapters=adapter or (), quantize=quantize.quantize, reporter=console)
    end_at_next_signal()
    server = start_server(converted, name, config)
    console.result(server.listening_address)
    if converted.config.tokenizer.chat_template is None:
        console.note("The model has no chat template: it continues texts (/v1/completions, and the page).")
    console.note(f"Serving {name}; Ctrl-C ends.")
    while True:
        time.sleep(WAIT_SECONDS)
