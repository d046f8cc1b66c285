"""One worker of pytest-xdist runs a file, or the files of a group, and makes what their tests share once."""


def test_the_id_of_a_test_has_its_group_by_which_workers_take_tests(request):
    takes_groups = getattr(request.config.option, "loadgroup", False)  # xdist sets it in its workers
    assert request.node.nodeid.endswith("@test_groups") == takes_groups
