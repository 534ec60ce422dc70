"""A store belongs to one tenant; jobs of that tenant share it."""

from harvester.contracts.ids import JobId
from scheduler.gateway.policy.store_owners import MAX_STORES, StoreOwners, StoreRule

TRAIN, EVALUATE, OTHER = JobId("train"), JobId("evaluate"), JobId("other")
JOBS = {
    TRAIN: StoreRule(tenant="a"),
    EVALUATE: StoreRule(tenant="a"),
    OTHER: StoreRule(tenant="b"),
}


def test_a_store_is_the_first_publisher_s_tenant_s() -> None:
    owners = StoreOwners(JOBS)
    assert owners.refusal(OTHER, "weights") == ""
    owners.note(TRAIN, "weights")
    assert owners.refusal(EVALUATE, "weights") == owners.refusal(TRAIN, "weights") == ""
    assert owners.refusal(OTHER, "weights") == (
        "weights is another tenant's; publish under another name, or have the operator give job "
        "other a pattern `stores` that it matches"
    )
    assert owners.refusal(OTHER, "weights-b") == ""


def test_owners_come_back_with_what_was_published_and_go_with_their_jobs() -> None:
    published = [("weights", TRAIN), ("weights", EVALUATE), ("weights", OTHER)]
    assert StoreOwners(JOBS, published).refusal(OTHER, "weights")
    fewer = {job: rule for job, rule in JOBS.items() if job != TRAIN}
    assert StoreOwners(fewer, published).refusal(OTHER, "weights"), "evaluate has published it too"
    alone = StoreOwners({OTHER: JOBS[OTHER]}, published)
    assert alone.refusal(OTHER, "weights") == ""


def test_a_store_with_the_name_of_a_job_is_its_tenant_s_before_any_publish() -> None:
    owners = StoreOwners(JOBS, [("train", OTHER)])
    assert owners.refusal(OTHER, "train")
    assert owners.refusal(EVALUATE, "train") == ""


def test_a_pattern_keeps_its_stores_and_lets_its_job_publish_what_another_tenant_began() -> None:
    jobs = JOBS | {TRAIN: StoreRule(tenant="a", pattern="a-*")}
    owners = StoreOwners(jobs, [("shared", EVALUATE)])
    assert owners.refusal(OTHER, "a-new")
    assert owners.refusal(EVALUATE, "a-new") == ""
    assert owners.refusal(TRAIN, "shared") == "job train may publish a-*, not shared"
    given = jobs | {OTHER: StoreRule(tenant="b", pattern="shared")}
    assert StoreOwners(given, [("shared", EVALUATE)]).refusal(OTHER, "shared") == ""


def test_the_pattern_of_every_store_keeps_none_from_others() -> None:
    owners = StoreOwners(JOBS | {OTHER: StoreRule(tenant="b", pattern="*")}, [("w", TRAIN)])
    assert owners.refusal(OTHER, "w") == ""
    assert owners.refusal(TRAIN, "new") == ""


def test_one_job_claims_a_bounded_number_of_names() -> None:
    owners = StoreOwners(JOBS, [(f"s{number}", OTHER) for number in range(MAX_STORES)])
    assert owners.refusal(OTHER, "s0") == ""
    assert f"{MAX_STORES} stores" in owners.refusal(OTHER, "one-more")
    assert owners.refusal(TRAIN, "one-more") == ""


def test_a_job_with_a_pattern_publishes_more_stores_than_are_remembered() -> None:
    owners = StoreOwners(JOBS | {OTHER: StoreRule(tenant="b", pattern="b-*")})
    for number in range(MAX_STORES + 1):
        owners.note(OTHER, f"b-{number}")
    assert owners.remembers(OTHER, "b-0")
    assert not owners.remembers(OTHER, f"b-{MAX_STORES}")
    assert owners.refusal(OTHER, f"b-{MAX_STORES}") == ""
    assert owners.refusal(TRAIN, f"b-{MAX_STORES}")
