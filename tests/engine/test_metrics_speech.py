"""What a voice's totals become on /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from motet.engine.metrics import Metrics


def test_speech_counts_under_its_model() -> None:
    metrics = Metrics()
    first = {"buckets": [[0.1, 2], [0.15, 3], [None, 4]], "sum": 0.9}
    stats = {
        "generation_tokens": 820,
        "speech_seconds": 10.5,
        "underruns": 2,
        "first_audio": first,
        "active_streams": 3,
    }
    metrics.set_engine_stats({"models": {"motet-voice": stats}})
    found = {
        (sample.name, sample.labels.get("le")): (sample.value, sample.labels)
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    assert found["vllm:generation_tokens_total", None] == (820, {"model_name": "motet-voice", "engine": "0"})
    assert found["motet_tts_audio_seconds_total", None][0] == 10.5
    assert found["motet_tts_underruns_total", None][0] == 2
    assert found["motet_active_streams", None][0] == 3
    assert found["motet_tts_first_audio_seconds_bucket", "0.15"][0] == 3
    assert found["motet_tts_first_audio_seconds_count", None][0] == 4
