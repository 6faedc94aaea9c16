"""Display of a Dist, a ReducedDist and a KV in notebooks: it never fails, and it keeps no result slot."""


def test_a_distribution_is_shown_with_the_text_of_its_likeliest_tokens(daemon):
    daemon.run(
        """
        kv = sym.kv_create()
        dist = sym.pred(kv, [60, 62])
        html = dist._repr_html_()
        assert html.count("<tr>") == 10
        assert f">{dist.argmax()}</td>" in html
        logits = [0.0] * 259
        logits[60] = 9.0                                    # <
        logits[0xC3] = 8.0                                  # half of a character
        html = sym.Dist.of(logits)._repr_html_()
        assert "<code>'&lt;'</code>" in html and "'<'" not in html
        assert "b'\\\\xc3'" in html
        assert "color:#" not in html and "http" not in html  # any theme, and nothing from elsewhere
        rows = sym.pred(kv, [65, 66], rows="all")
        assert "the last of 2 rows" in rows._repr_html_()
        assert repr(rows).startswith("<Dist of 259 tokens, 2 rows: ") and len(repr(rows)) < 120
        """
    )


def test_what_was_asked_for_is_all_that_is_shown(daemon):
    daemon.run(
        """
        kv = sym.kv_create()
        dist = sym.pred(kv, [65], top_k=3, logprobs=[7], sampler=sym.Sampler(seed=4))
        html = dist._repr_html_()
        assert html.count("<tr>") == len({7, dist.token, *(token for token, _ in dist.topk(3))})
        assert f"{dist.token}, drawn" in html
        many = sym.pred(kv, [65], logprobs=range(50), sampler=sym.Sampler.greedy())._repr_html_()
        assert 10 <= many.count("<tr>") <= 11 and "tokens</div>" in many
        """
    )


def test_a_file_is_shown_with_its_name_its_entries_and_the_end_of_its_text(daemon):
    daemon.run(
        """
        kv = sym.kv_create("<b>.kv")
        kv.write(sym.tokenize("The end of this text is <bold>"))
        html = kv._repr_html_()
        assert "KV &lt;b&gt;.kv" in html and ">30</td>" in html
        assert "this text is &lt;bold&gt;" in html and ">memory</td>" in html
        kv.remove()
        assert kv._repr_html_() is None and repr(kv) == "<KV <b>.kv, closed>"
        """
    )


def test_more_distributions_are_shown_and_kept_than_there_are_slots(daemon):
    """Out and _ of a notebook hold what it showed."""
    out = daemon.run(
        """
        from libsym.channel.process import process
        kv, held = sym.kv_create(), []
        for _ in range(process.channel().num_slots + 8):
            dist = sym.pred(kv, [65])
            before = dist.argmax(), dist.entropy()
            dist._repr_html_()
            assert (dist.argmax(), dist.entropy()) == before
            held.append(dist)
        print("all")
        """
    )
    assert out == "all\n"


def test_nothing_fails_because_the_daemon_is_gone_or_a_row_has_no_answer(daemon):
    daemon.run(
        """
        kv = sym.kv_create()
        dist = sym.pred(kv, [65])
        sym.close()
        assert "<table" in dist._repr_html_() and kv._repr_html_() is None
        dist.close()
        assert dist._repr_html_() is None
        assert sym.Dist.of([float("nan"), 1.0])._repr_html_() is None
        assert "<table" in sym.Dist.of([1.0, float("-inf")])._repr_html_()
        """
    )


def test_entries_are_kept_in_place(daemon):
    daemon.run(
        """
        kv = sym.kv_create()
        kv.write([10, 11, 12, 13])
        fork = kv.fork()
        kv.keep([0, (-2, None)], rebase=False)
        assert kv.read() == ([10, 12, 13], [0, 2, 3]) and fork.len() == 4
        assert kv.write([14]) == 4 and kv.read(-1) == ([14], [4])
        try:
            kv.keep([(0, 9)])
        except sym.Invalid:
            assert kv.len() == 4                            # it is what it was
        else:
            raise AssertionError
        kv.keep([])
        assert kv.len() == 0
        try:
            sym.kv_create("named.kv").keep([])
        except sym.Invalid as error:
            assert "named.kv has a name" in str(error)
        else:
            raise AssertionError
        sym.daemon_check()
        """
    )


def test_a_loop_goes_on_with_what_is_kept(daemon):
    """`decode`, in an event loop, too: the object is the file, whatever entries it has."""
    out = daemon.run(
        """
        import asyncio
        kv = sym.kv_create()
        for number, token in enumerate(sym.decode(kv, [65] * 30, sym.Dist.argmax, max_tokens=40)):
            if kv.len() > 40:
                kv.keep([(0, 4), (-20, None)])
        assert number == 39 and kv.len() <= 41

        async def main():
            kv = await sym.aio.kv_create()
            await sym.aio.kv_write(kv, [1, 2, 3])
            await sym.aio.kv_keep(kv, [0, 2])
            return await sym.aio.kv_read(kv)

        print(asyncio.run(main()))
        """
    )
    assert out == "([1, 3], [0, 1])\n"
