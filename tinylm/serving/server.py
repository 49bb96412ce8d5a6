"""An OpenAI-compatible server: llama.cpp's own, on a file that tinylm converted."""

import socket
from pathlib import Path
from typing import Any

from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.llama_cpp import GGUF_FOLDER, Conversion, free_cores, import_llama_cpp, kept_signal_handlers
from tinylm.kernels.process import share_heaps
from tinylm.serving.server_config import ServerConfig
from tinylm.system.cache_directory import private_folder

# Of a base model: a chat continues the text of its messages, and the page completes texts.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
COMPLETION_PAGE = Path(__file__).with_name("completion_page")
MAX_CONTEXT = 4096  # tokens of a request, unless more are asked for: the cache takes memory for each


def start_server(model: Conversion, name: str, config: ServerConfig) -> Any:
    """llama.cpp's server for a model that was converted with its tokenizer; its `listening_address` is the URL.

    The caller keeps it until the process ends: destroyed earlier, it would wait for clients that read a stream.

    name: the name of the model in answers. Raises UsageError for an address that cannot be used, and TinyLMError if
    llama.cpp does not start.
    """
    _check_address(config)
    share_heaps()
    library = import_llama_cpp()
    parameters, cores = library.CommonParams(), free_cores()
    parameters.model.path = str(private_folder(GGUF_FOLDER) / model.gguf)
    parameters.model_alias = {name}
    parameters.hostnames, parameters.port = [config.host], config.port
    parameters.api_keys = [] if config.api_key is None else [config.api_key]
    url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}"
    parameters.cors_origins, parameters.cors_origins_explicit = url, True  # pages of other sites cannot read answers
    parameters.n_parallel = config.parallel
    context = min(model.config.model.context, config.serving_context or MAX_CONTEXT)
    parameters.n_ctx = config.parallel * context
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = cores
    parameters.n_gpu_layers = 0
    parameters.embedding = True
    parameters.pooling_type = library.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    parameters.cache_ram_mib = parameters.n_ctx_checkpoints = 0  # of earlier requests, up to 8 GiB
    parameters.fit_params = parameters.warmup = parameters.endpoint_slots = False
    parameters.verbosity = -1  # silent
    if model.config.tokenizer.chat_template is None:
        parameters.chat_template, parameters.public_path = PLAIN_TEMPLATE, str(COMPLETION_PAGE)
    try:
        with kept_signal_handlers():
            server = library.Server(parameters)
    except RuntimeError as error:
        raise TinyLMError(
            f"llama.cpp cannot serve {name} on {url}: try another `port`, or fewer `parallel`."
        ) from error
    return server


def _check_address(config: ServerConfig) -> None:
    """Raise UsageError if the address cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(
            f"Cannot listen on {config.host}, port {config.port}: {reason}. Choose another `port` (0: any) or `host`."
        ) from error
