"""What a trace of torch's profiler says of a step: when the device computed, when it stood still, and what for."""

import bisect
import collections
import itertools

STEP = "step"
PHASES = ("forward", "backward", "clip", "update")
LEAST_GAP_S = 1e-3
MOST_GAPS = 40
_MOST_CHARS = 90
_RANGES, _OPERATORS, _CALLS = ("user_annotation",), ("cpu_op",), ("cuda_runtime", "cuda_driver")
_COPIES = {"HtoD": "to_device", "DtoH": "to_host"}


def summarize(events, updates=()):
    """Where the seconds of a step went. Those of kernels, gaps and short gaps together are the step.

    Args:
        events: The events of a Chrome trace. The last range ``step`` is the step, with its phases inside; a kernel is
            of the phase in which the host launched it. Without kernels, operators of the host are taken for them.
        updates: Begin and end of each piece of work that updated chunks on the host, in microseconds as in the trace.

    Returns:
        Seconds, and moments in seconds since the step began: ``kernels`` by phase, ``copies`` and ``copied_nbytes`` by
        direction, ``gaps`` (the longest that took more than a millisecond without any kernel, each with what the host
        did), ``gap_seconds`` and ``short_gap_seconds``, ``unexplained`` (in gaps, where the trace does not say what the
        host did), ``updates``, from the last kernel of backward to the first update, and from the last update of the
        step before to the first kernel after the copy to the device that follows it.
    """
    spans = [_Span(event) for event in events if event.get("ph") == "X" and "dur" in event]
    ranges = [span for span in spans if span.kind in _RANGES]
    step = max((span for span in ranges if span.name == STEP), key=lambda span: span.begin)
    phases = sorted((span for span in ranges if span.name in PHASES), key=lambda span: span.begin)
    kernels = [span for span in spans if span.kind == "kernel"] or [s for s in spans if s.kind in _OPERATORS]
    launches = {span.correlation: span.begin for span in spans if span.kind in _CALLS}
    by_phase = collections.defaultdict(list)
    for kernel in kernels:
        by_phase[_phase_at(launches.get(kernel.correlation, kernel.begin), phases)].append(kernel)
    inside = {phase: _union(found, step) for phase, found in by_phase.items()}
    busy = _union(kernels, step)
    ends = [step.begin, *itertools.chain(*busy), step.end]
    gaps = [(begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=True) if end > begin]
    long = [(begin, end) for begin, end in gaps if end - begin > LEAST_GAP_S * 1e6]
    copies = {way: [s for s in spans if s.kind == "gpu_memcpy" and word in s.name] for word, way in _COPIES.items()}
    copying = _union(itertools.chain(*copies.values()), step)
    host = _Host(spans, step)
    rows, unexplained = [], collections.Counter()
    for begin, end in long:
        named, unnamed = host.during(begin, end, phases)
        unexplained.update(unnamed)
        what = max((named + unnamed).items(), key=lambda item: item[1])[0]
        row = {"at": begin - step.begin, "seconds": end - begin, "copying": _overlap(copying, begin, end)}
        rows.append({name: _seconds(us) for name, us in row.items()} | {"host": what})
    longest = sorted(rows, key=lambda row: -row["seconds"])[:MOST_GAPS]
    return {
        "seconds": _seconds(step.end - step.begin),
        "kernels": {phase: _seconds(_length(found)) for phase, found in inside.items() if found},
        "copies": {way: _seconds(_length(_union(found, step))) for way, found in copies.items()},
        "copied_nbytes": {way: sum(s.nbytes for s in found if step.has(s.begin)) for way, found in copies.items()},
        "gaps": sorted(longest, key=lambda row: row["at"]),
        "num_gaps": len(long),
        "gap_seconds": _seconds(_length(long)),
        "short_gap_seconds": _seconds(_length(gaps) - _length(long)),
        "unexplained": {what: _seconds(us) for what, us in unexplained.items()},
        "unexplained_share": round(sum(unexplained.values()) / (step.end - step.begin), 4),
        **_of_updates(sorted(updates), step, phases, by_phase["backward"], kernels, copies["to_device"]),
    }


def _of_updates(updates, step, phases, backward, kernels, copies):
    """When chunks were updated, and what was waited for before and after."""
    begun = max((span.begin for span in phases if span.name == "update"), default=step.end)
    own = [begin for begin, _ in updates if begin >= begun]
    before = [end for begin, end in updates if begin < begun and end > step.begin]
    found = {"updates": [[_seconds(us - step.begin) for us in pair] for pair in updates]}
    computed = [kernel.end for kernel in backward if kernel.end <= step.end]
    if own and computed:
        found["backward_to_update"] = _seconds(own[0] - max(computed))
    arrivals = [copy.end for copy in copies if before and copy.begin >= max(before)]
    later = [kernel.begin for kernel in kernels if arrivals and kernel.begin >= min(arrivals)]
    if later:
        found["update_to_kernel"] = _seconds(min(later) - max(before))
    return found


class _Span:
    """An event with a begin and an end, in microseconds."""

    def __init__(self, event):
        told = event.get("args", {})
        self.name, self.kind, self.thread = event.get("name", ""), event.get("cat", ""), event.get("tid")
        self.begin = float(event["ts"])
        self.end = self.begin + float(event["dur"])
        self.correlation, self.nbytes = told.get("correlation"), int(told.get("bytes", 0))

    def has(self, moment):
        """Whether a moment is inside."""
        return self.begin <= moment <= self.end


class _Host:
    """What the threads did whose operators were recorded: the one of the step, and those of backward."""

    def __init__(self, spans, step):
        threads = collections.defaultdict(list)
        for span in spans:
            if span.kind in (*_RANGES, *_OPERATORS, *_CALLS) and span.end > step.begin and span.begin < step.end:
                threads[span.thread].append(span)
        recorded = [found for found in threads.values() if any(span.kind not in _CALLS for span in found)]
        recorded.sort(key=lambda found: found[0].thread != step.thread)
        self._segments = [_innermost(found) for found in recorded]

    def during(self, begin, end, phases):
        """Microseconds of what the host did in a gap, by name, and of those in which nothing was recorded."""
        named, left = collections.Counter(), [(begin, end)]
        for segments in self._segments:
            rest = []
            for since, until in left:
                place = max(bisect.bisect_right(segments, since, key=lambda segment: segment[0]) - 1, 0)
                for first, last, label in itertools.islice(segments, place, None):
                    if first >= until:
                        break
                    if last > since:
                        rest.append((since, max(first, since)))
                        named[label] += min(last, until) - max(first, since)
                        since = min(last, until)
                rest.append((since, until))
            left = [(since, until) for since, until in rest if until > since]
        unnamed = collections.Counter()
        for since, until in left:
            for phase in phases:
                unnamed[f"Python in {phase.name}"] += _overlap([(since, until)], phase.begin, phase.end)
        unnamed["between phases"] = _length(left) - unnamed.total()
        return named, +unnamed


def _innermost(spans):
    """Begin, end and name of what one thread did, innermost first: a range, an operator in it, and a call in that."""
    segments, stack, cursor = [], [], 0.0

    def go_on(until):
        nonlocal cursor
        if stack and until > cursor and stack[-1][1]:
            segments.append((cursor, until, " > ".join(stack[-1][1])[:_MOST_CHARS]))
        cursor = max(cursor, until)

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while stack and stack[-1][0] <= span.begin:
            go_on(stack[-1][0])
            stack.pop()
        go_on(span.begin)
        words = stack[-1][1] if stack else ()
        if span.kind in _RANGES:
            words = words if span.name in (STEP, *PHASES) else (span.name,)
        elif span.kind in _CALLS:
            words = (*words, span.name)
        else:
            words = (*(word for word in words if not word.startswith(("aten::", "autograd::"))), span.name)
        stack.append((min(span.end, stack[-1][0]) if stack else span.end, words))
    while stack:
        go_on(stack[-1][0])
        stack.pop()
    return segments


def _phase_at(moment, phases):
    """The phase in which a moment is."""
    place = bisect.bisect_right(phases, moment, key=lambda span: span.begin) - 1
    return phases[place].name if place >= 0 and phases[place].has(moment) else "between phases"


def _union(spans, step):
    """Begin and end of what spans cover together in the step, in order."""
    found = []
    for span in sorted(spans, key=lambda span: span.begin):
        begin, end = max(span.begin, step.begin), min(span.end, step.end)
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _overlap(covered, begin, end):
    return sum(max(min(last, end) - max(first, begin), 0.0) for first, last in covered)


def _length(covered):
    return sum(end - begin for begin, end in covered)


def _seconds(us):
    return round(us / 1e6, 6)
