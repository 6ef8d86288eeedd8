"""What an image model's totals become on /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from motet.engine.metrics import Metrics

from .scripted_adapter import engine, request, run


def test_an_engines_own_stats_appear_under_its_model() -> None:
    one = engine()
    run(one, request("a", num_steps=3, n=2), request("b", "nan"))
    stats = one.stats()
    one.close()
    metrics = Metrics()
    metrics.set_engine_stats({"models": {"motet-emoji": stats}})
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.labels.get("model") == "motet-emoji"
    }
    assert found["motet_diffusion_steps_total"] == one.counters.num_steps >= 3
    assert found["motet_diffusion_rows_total"] >= 12 and found["motet_diffusion_skipped_rows_total"] == 0
    assert found["motet_diffusion_pictures_total"] == 2 and found["motet_diffusion_failures_total"] == 1
    assert found["motet_diffusion_prompt_cache_queries_total"] == 4
    assert found["motet_diffusion_running_rows"] == found["motet_requests_running"] == 0
    for stage in ("encode", "denoise", "decode"):
        assert found[f"motet_diffusion_{stage}_seconds_total"] >= 0
