"""Adapters while serving, and what trainers do: pause, resume, other weights, prefixes forgotten."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ferrum_jax.serve.body import read_json
from ferrum_jax.serve.errors import JsonAnswer
from ferrum_jax.serve.schema import LoadAdapterBody, PauseBody, UnloadAdapterBody, UpdateWeightsBody
from ferrum_jax.serve.service import Service


async def load_adapter(service: Service, http: HttpRequest) -> Response:
    """Loads an adapter from a folder under the server's `--adapter-root`."""
    body = await read_json(service, http, LoadAdapterBody)
    await service.load_adapter(body.lora_name, service.path_of_adapter(body.lora_path))
    return JsonAnswer({"message": f"adapter {body.lora_name!r} is loaded"})


async def unload_adapter(service: Service, http: HttpRequest) -> Response:
    """Drops an adapter once the requests under it have ended."""
    body = await read_json(service, http, UnloadAdapterBody)
    service.path_of_adapter("")
    await service.unload_adapter(body.lora_name)
    return JsonAnswer({"message": f"adapter {body.lora_name!r} is unloaded"})


async def pause(service: Service, http: HttpRequest) -> Response:
    """Lets nothing new begin; what runs ends first, or at once with what it has."""
    body = await read_json(service, http, PauseBody)
    if body.mode == "abort":
        service.admission.close()
        ended = asyncio.ensure_future(service.admission.pause())
        while not ended.done():  # a request that has begun may not be known yet, while its prompt is tokenised
            for answers in list(service.live):
                await asyncio.to_thread(answers.interrupt)
            await asyncio.wait({ended}, timeout=0.05)
    await service.admission.pause()
    return JsonAnswer({"is_paused": service.admission.is_paused})


async def resume(service: Service, http: HttpRequest) -> Response:
    """Lets go on what waits."""
    service.admission.resume()
    return JsonAnswer({"is_paused": service.admission.is_paused})


async def is_paused(service: Service, http: HttpRequest) -> Response:
    """Tells whether the server is paused."""
    return JsonAnswer({"is_paused": service.admission.is_paused})


async def update_weights(service: Service, http: HttpRequest) -> Response:
    """Sets the weights of another checkpoint of the same model."""
    body = await read_json(service, http, UpdateWeightsBody)
    return JsonAnswer({"weight_version": await service.update_weights(body.path, body.live)})


async def reset_prefix_cache(service: Service, http: HttpRequest) -> Response:
    """Forgets every known prefix."""
    await service.run(service.llm.reset_prefix_cache, administers=True)
    return JsonAnswer({})
