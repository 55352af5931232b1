"""A redirect chain that has to wait: its first requests are not repeated, even after a kill."""

from __future__ import annotations

from collections import Counter

from tests.e2e.harness import Project, Site, product, wait_for

from penstock.testing.web import Reply


def test_another_worker_continues_a_parked_chain_after_a_kill(project: Project, site: Site) -> None:
    slow = Site()
    try:
        project.allow(slow.port)
        project.set(robots="ignore")
        project.good("domains", "limit", f"127.0.0.1:{slow.port}", "0.06")
        site.serve("/p/a", Reply(302, {"location": slow.url("/p/b")}))
        slow.serve("/p/b", Reply(302, {"location": site.url("/p/c")}))
        slow.serve("/p/first", product("first"))
        site.serve("/p/c", product("c"))
        # The first page uses the slot of the slow host. So the chain has to wait for 16 s.
        project.push(slow.url("/p/first"))
        worker = project.start("run", "shop.py")
        wait_for(lambda: slow.asked("/p/first"), "the first page is requested")
        project.push(site.url("/p/a"))
        wait_for(
            lambda: project.event(site.url("/p/a"))["status"] == "delayed", "parked", every=0.2
        )
        worker.kill()
        assert (len(site.asked("/p/a")), len(slow.asked("/p/b"))) == (1, 0)
        project.run()
        requests = Counter(
            entry.path for one in (site, slow) for entry in one.web.entries if "/p/" in entry.path
        )
        assert requests == {"/p/first": 1, "/p/a": 1, "/p/b": 1, "/p/c": 1}
        assert {row["sku"] for row in project.rows()} == {"S-first", "S-c"}
    finally:
        slow.close()
