"""Every metric name in one file: what is counted, under which name, with which buckets. Never imports torch.

Two sources: the server observes requests as they start, stream and end (`Metrics`), and the engine's own totals come
with `client.stats()` (`Metrics.set_engine_stats`). Names are `motet_*`; `VLLM_NAMES` lists the aliases under which the
same numbers appear as `vllm:*`, so that dashboards made for vLLM work unedited (labels `model_name` and `engine`).

Model labels are served ids only; what a client merely claims becomes "other", so labels stay bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .types import Timing, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Boundaries in seconds; the ones that common dashboards expect.
TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
HTTP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
RTF_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # seconds per second of audio
PICTURE_BUCKETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600)
SESSION_BUCKETS = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200)
# Tokens, requests.
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
COUNT_BUCKETS = (1, 2, 5, 10, 20)

VLLM_NAMES: Mapping[str, tuple[str, ...]] = {
    "motet_requests_running": ("vllm:num_requests_running",),
    "motet_requests_waiting": ("vllm:num_requests_waiting",),
    "motet_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "motet_preemptions": ("vllm:num_preemptions",),
    "motet_prompt_tokens": ("vllm:prompt_tokens",),
    "motet_generation_tokens": ("vllm:generation_tokens",),
    "motet_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "motet_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "motet_step_tokens": ("vllm:iteration_tokens_total",),
    "motet_requests_success": ("vllm:request_success",),
    "motet_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "motet_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "motet_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "motet_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "motet_request_queue_seconds": ("vllm:request_queue_time_seconds",),
    "motet_request_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "motet_request_decode_seconds": ("vllm:request_decode_time_seconds",),
    "motet_request_inference_seconds": ("vllm:request_inference_time_seconds",),
    "motet_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "motet_request_generation_tokens": ("vllm:request_generation_tokens",),
    "motet_request_params_n": ("vllm:request_params_n",),
    "motet_request_params_max_tokens": ("vllm:request_params_max_tokens",),
    "motet_rejections": ("vllm:admission_rejections",),
}

# Engine totals out of client.stats()["models"][id]: key -> (name, help, is a counter).
_STATS: Mapping[str, tuple[str, str, bool]] = {
    "running": ("motet_requests_running", "Requests in the running batch.", False),
    "waiting": ("motet_requests_waiting", "Requests waiting to be scheduled.", False),
    "kv_usage": ("motet_kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1.", False),
    "preemptions": ("motet_preemptions", "Requests put back to waiting for want of KV blocks.", True),
    "device_seconds": ("motet_device_seconds", "Seconds that the model's steps had the device.", True),
    "prompt_tokens": ("motet_prompt_tokens", "Prompt tokens computed or found in the prefix cache.", True),
    "generation_tokens": ("motet_generation_tokens", "Output tokens.", True),
    "prefix_queries": ("motet_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", True),
    "prefix_hits": ("motet_prefix_cache_hits", "Prompt tokens found in the prefix cache.", True),
    "speech_seconds": ("motet_tts_audio_seconds", "Speech that was made.", True),
    "underruns": ("motet_tts_underruns", "Times that a listener in real time had nothing to play.", True),
    "underrun_seconds": ("motet_tts_underrun_seconds", "Seconds that listeners had nothing to play.", True),
    "cut_utterances": ("motet_tts_cut_utterances", "Utterances that did not end by themselves.", True),
    "diffusion_steps": ("motet_diffusion_steps", "Denoise steps of a batch of rows.", True),
    "diffusion_rows": ("motet_diffusion_rows", "Rows in those steps: guidance branches of pictures.", True),
    "diffusion_skipped_rows": ("motet_diffusion_skipped_rows", "Rows for which a step cache left blocks out.", True),
    "diffusion_running_rows": ("motet_diffusion_running_rows", "Rows that are being denoised.", False),
    "pictures": ("motet_diffusion_pictures", "Pictures that were made.", True),
    "picture_previews": ("motet_diffusion_previews", "Previews that were sent.", True),
    "failed_pictures": ("motet_diffusion_failures", "Requests for pictures that ended by an error.", True),
    "prompt_cache_queries": ("motet_diffusion_prompt_cache_queries", "Prompts looked up among those encoded.", True),
    "prompt_cache_hits": ("motet_diffusion_prompt_cache_hits", "Prompts found there.", True),
    "encode_seconds": ("motet_diffusion_encode_seconds", "Seconds that the encode stage worked.", True),
    "denoise_seconds": ("motet_diffusion_denoise_seconds", "Seconds that the denoise stage worked.", True),
    "decode_seconds": ("motet_diffusion_decode_seconds", "Seconds that the decode stage worked.", True),
    "active_streams": ("motet_active_streams", "Live streams: listened to by a recogniser, spoken by a voice.", False),
}


class EngineStats(Collector):
    """The last `client.stats()` as metrics. Unknown keys are ignored, missing ones left out."""

    def __init__(self) -> None:
        self.models: Mapping[str, Mapping[str, Any]] = {}

    def collect(self) -> Iterator[Metric]:
        for key, (name, text, is_counter) in _STATS.items():
            family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(name, text, labels=["model"])
            for model, stats in self.models.items():
                if key in stats:
                    family.add_metric([model], float(stats[key]))
            yield family
        yield self._histogram("step_tokens", "motet_step_tokens", "Tokens computed in one engine step.")
        yield self._histogram(
            "first_audio", "motet_tts_first_audio_seconds", "From an utterance's arrival to its first audio."
        )
        yield self._roofline()
        yield self._cache_config("motet_kv_cache", "model")
        yield self._cache_config("vllm:cache_config", "model_name")

    def _histogram(self, key: str, name: str, text: str) -> Metric:
        """What stats hold as {key: {"buckets": [[le, cumulative count], ...], "sum": x}}."""
        family = HistogramMetricFamily(name, text, labels=["model"])
        for model, stats in self.models.items():
            steps = stats.get(key)
            if isinstance(steps, Mapping) and steps.get("buckets"):
                buckets = [("+Inf" if le in (None, "+Inf") else str(float(le)), float(n)) for le, n in steps["buckets"]]
                family.add_metric([model], buckets, float(steps.get("sum", 0.0)))
        return family

    def _roofline(self) -> Metric:
        """From stats' {"roofline": {phase: fraction}}."""
        family = GaugeMetricFamily(
            "motet_roofline_fraction",
            "Least time that the machine's memory and arithmetic allow a step, over the time that recent steps took.",
            labels=["model", "phase"],
        )
        for model, stats in self.models.items():
            for phase, fraction in (stats.get("roofline") or {}).items():
                family.add_metric([model, phase], float(fraction))
        return family

    def _cache_config(self, name: str, label: str) -> Metric:
        family = GaugeMetricFamily(
            f"{name}_info",
            "Shape of the KV cache, in labels; the value is 1.",
            labels=[label, "block_size", "num_gpu_blocks"],
        )
        for model, stats in self.models.items():
            if "num_blocks" in stats:
                family.add_metric([model, str(stats.get("block_size", "")), str(stats["num_blocks"])], 1.0)
        return family


class VllmAliases(Collector):
    """The same numbers under vLLM's names, made when scraped: nothing is counted twice."""

    def __init__(self, sources: Iterable[Any]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for metric in source.collect():
                for alias in VLLM_NAMES.get(metric.name, ()):
                    yield _renamed(metric, alias)


class _Rendered(CollectorRegistry):
    """A registry without the `_created` samples, which would double the text and which no dashboard reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._inner = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def _renamed(metric: Metric, name: str) -> Metric:
    other = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        suffix = sample.name[len(metric.name) :]
        if suffix == "_created":
            continue
        labels = {("model_name" if key == "model" else key): value for key, value in sample.labels.items()}
        other.add_sample(name + suffix, {**labels, "engine": "0"}, sample.value)
    return other


@dataclass(frozen=True, slots=True)
class ModelMeters:
    """The histograms of one model with their label bound, so that a token costs one bucket search."""

    first_token: Histogram
    inter_token: Histogram
    per_output_token: Histogram
    latency: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    params_n: Histogram
    params_max_tokens: Histogram


class Metrics:
    """All that one server counts. Each instance has its own registry, so that tests and several apps stay apart."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = EngineStats()
        self._bound: dict[str, ModelMeters] = {}
        model = ("model",)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, model, registry=self.registry, buckets=buckets)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._meters = ModelMeters(
            first_token=histogram("motet_time_to_first_token_seconds", "From arrival to the first text.", TTFT_BUCKETS),
            inter_token=histogram("motet_inter_token_latency_seconds", "Between two outputs.", ITL_BUCKETS),
            per_output_token=histogram(
                "motet_time_per_output_token_seconds", "Mean per request, first token excluded.", ITL_BUCKETS
            ),
            latency=histogram("motet_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS),
            queue=histogram("motet_request_queue_seconds", "From submit until first scheduled.", LATENCY_BUCKETS),
            prefill=histogram("motet_request_prefill_seconds", "From first scheduled to first token.", LATENCY_BUCKETS),
            decode=histogram("motet_request_decode_seconds", "From the first to the last token.", LATENCY_BUCKETS),
            inference=histogram(
                "motet_request_inference_seconds", "From first scheduled to the last token.", LATENCY_BUCKETS
            ),
            prompt_tokens=histogram("motet_request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS),
            generation_tokens=histogram(
                "motet_request_generation_tokens", "Output tokens of one answer.", LENGTH_BUCKETS
            ),
            params_n=histogram("motet_request_params_n", "Answers asked for.", COUNT_BUCKETS),
            params_max_tokens=histogram("motet_request_params_max_tokens", "Output limit asked for.", LENGTH_BUCKETS),
        )
        self._success = counter("motet_requests_success", "Answers that ended as asked.", ("model", "finished_reason"))
        self._aborted = counter("motet_requests_aborted", "Requests that ended early by a wish.", ("model", "reason"))
        self._failed = counter("motet_requests_failed", "Requests that ended by an error.", ("model", "code"))
        self._rejections = counter("motet_rejections", "Requests refused before the engine saw them.", ("reason",))
        self._http = counter("motet_http_requests", "HTTP requests.", ("route", "method", "status_class"))
        self._http_seconds = Histogram(
            "motet_http_request_seconds",
            "From the first byte in to the last byte out.",
            ("route",),
            registry=self.registry,
            buckets=HTTP_BUCKETS,
        )
        self._disconnects = counter("motet_client_disconnects", "Clients that left before their answer.", ("phase",))
        self._audio = counter("motet_asr_audio_seconds", "Audio that was transcribed.", ("model",))
        self._rtf = Histogram(
            "motet_asr_rtf",
            "Time from submit to the last text of a file, per second of its audio.",
            ("model",),
            registry=self.registry,
            buckets=RTF_BUCKETS,
        )
        self._pictures = histogram(
            "motet_diffusion_picture_seconds", "From a request's arrival to each of its pictures.", PICTURE_BUCKETS
        )
        self._sockets = counter("motet_websocket_connections", "WebSockets accepted.", ("route",))
        self._sockets_open = Gauge(
            "motet_websocket_connections_active", "WebSockets open now.", ("route",), registry=self.registry
        )
        self._socket_seconds = Histogram(
            "motet_websocket_connection_duration_seconds",
            "From accept to close.",
            ("route",),
            registry=self.registry,
            buckets=SESSION_BUCKETS,
        )
        self._in_flight = Gauge(
            "motet_http_requests_in_flight", "HTTP requests being answered.", registry=self.registry
        )
        self._queue_requests = Gauge(
            "motet_queue_depth", "Admitted requests that wait for their first token.", registry=self.registry
        )
        self._queue_tokens = Gauge("motet_queue_tokens", "Prompt tokens of those requests.", registry=self.registry)
        self._engine_up = Gauge("motet_engine_up", "1 while the engine answers.", registry=self.registry)
        self._restarts = Gauge("motet_engine_restarts", "Restarts of the engine process.", registry=self.registry)
        self.registry.register(self._engine)
        meters = (getattr(self._meters, name) for name in ModelMeters.__slots__)
        self.registry.register(VllmAliases([*meters, self._success, self._rejections, self._engine]))

    # ------------------------------------------------------------------------------------------ one request's life

    def meters(self, model: str) -> ModelMeters:
        """The histograms bound to `model`, which must be a served id."""
        bound = self._bound.get(model)
        if bound is None:
            bound = ModelMeters(*(getattr(self._meters, name).labels(model) for name in ModelMeters.__slots__))
            self._bound[model] = bound
        return bound

    def observe_submitted(self, model: str, *, n: int, max_tokens: int | None) -> None:
        meters = self.meters(model)
        meters.params_n.observe(n)
        if max_tokens is not None:
            meters.params_max_tokens.observe(max_tokens)

    def observe_done(self, model: str, finish_reason: str, usage: Usage, timing: Timing, latency_s: float) -> None:
        """One answer ended as asked. `latency_s` is the server's own view, `timing` the engine's."""
        meters = self.meters(model)
        self._success.labels(model, finish_reason).inc()
        meters.latency.observe(latency_s)
        meters.prompt_tokens.observe(usage.num_prompt_tokens)
        meters.generation_tokens.observe(usage.num_output_tokens)
        meters.queue.observe(timing.queue_s)
        meters.prefill.observe(max(timing.first_token_s - timing.queue_s, 0.0))
        decode_s = max(timing.total_s - timing.first_token_s, 0.0)
        meters.decode.observe(decode_s)
        meters.inference.observe(max(timing.total_s - timing.queue_s, 0.0))
        if usage.num_output_tokens > 1:
            meters.per_output_token.observe(decode_s / (usage.num_output_tokens - 1))

    def observe_aborted(self, model: str, reason: str) -> None:
        self._aborted.labels(model, reason).inc()

    def observe_failed(self, model: str, code: str) -> None:
        self._failed.labels(model, code).inc()

    # ------------------------------------------------------------------------------------------------- the HTTP side

    def observe_rejected(self, reason: str) -> None:
        self._rejections.labels(reason).inc()

    def observe_disconnect(self, phase: str) -> None:
        """`phase`: waiting (no byte answered yet) or streaming."""
        self._disconnects.labels(phase).inc()

    def http_started(self) -> None:
        self._in_flight.inc()

    def http_finished(self, route: str, method: str, status: int, seconds: float) -> None:
        """`route` is the route's template, "other" for an unknown path; `status` 499 when the client left."""
        self._in_flight.dec()
        self._http.labels(route, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(route).observe(seconds)

    def observe_transcribed(self, model: str, audio_s: float, *, total_s: float | None = None) -> None:
        """`audio_s` of speech became text; `total_s` is how long that took, given for files only."""
        self._audio.labels(model).inc(audio_s)
        if total_s is not None and audio_s > 0:
            self._rtf.labels(model).observe(total_s / audio_s)
        if total_s is not None:
            self._success.labels(model, "stop").inc()

    def observe_picture(self, model: str, seconds: float) -> None:
        """A picture was finished `seconds` after its request had come."""
        self._pictures.labels(model).observe(seconds)

    def socket_opened(self, route: str) -> None:
        self._sockets.labels(route).inc()
        self._sockets_open.labels(route).inc()

    def socket_closed(self, route: str, seconds: float) -> None:
        self._sockets_open.labels(route).dec()
        self._socket_seconds.labels(route).observe(seconds)

    def set_queue(self, num_requests: int, num_tokens: int) -> None:
        self._queue_requests.set(num_requests)
        self._queue_tokens.set(num_tokens)

    # ------------------------------------------------------------------------------------------------------- scraping

    def set_engine_stats(self, stats: Mapping[str, Any] | None, *, restarts: int = 0) -> None:
        """Take over `client.stats()`; None when the engine did not answer (the last totals stay)."""
        self._engine_up.set(0 if stats is None else 1)
        self._restarts.set(restarts)
        if stats is not None:
            self._engine.models = stats.get("models", {})

    def render(self) -> bytes:
        """The text exposition format, for GET /metrics (CONTENT_TYPE)."""
        return generate_latest(_Rendered(self.registry))
