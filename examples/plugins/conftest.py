"""Their tests run where they are installed: ``tests/test_new_plugin.py`` copies, installs and tests each."""

collect_ignore = [
    *("drafter", "engines", "environment", "kv_pool", "observer", "placer", "prioritizer", "splitter"),
]
