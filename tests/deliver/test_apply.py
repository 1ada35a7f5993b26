from tests.sample import PRODUCTS, Sample, snapshot


def test_apply_writes_the_products_and_nothing_else(sample: Sample) -> None:
    sample.apply().succeeds()
    found = snapshot(sample.out)
    assert found is not None
    assert set(found) == {
        *PRODUCTS,
        *(f"{name}.metadata" for name in PRODUCTS),
        "constraints.txt",
        "simple",
        "simple/index.html",
        "simple/demo",
        "simple/demo/index.html",
        "simple/plain",
        "simple/plain/index.html",
    }
    assert sorted(path.name for path in sample.out.parent.iterdir()) == ["dist"]
