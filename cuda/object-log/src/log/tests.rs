use cuda_calls::find;

use super::*;

/// A program whose calls succeed, and its log.
#[derive(Default)]
struct Program {
    log: Log,
}

fn route(context: u32) -> Route {
    Route { context, slot: 0, capture_mode: 0 }
}

const NO_VALUES: [u64; MAX_ARGUMENTS] = [0; MAX_ARGUMENTS];
const NONE: Outcome<'static> = Outcome {
    made: None,
    is_known: false,
    owner: None,
    dropped: None,
    ended: &[],
    values: &NO_VALUES,
    results: &[],
    image: (&[], 0),
    is_captured: false,
    captures: 0,
};

impl Program {
    fn call(&mut self, name: &str, words: &[u64], outcome: &Outcome<'_>) {
        self.log.described(find_exact(name), route(0), words, outcome);
    }

    fn create(&mut self, name: &str, made: u64, words: &[u64]) {
        self.call(name, &[&[made], words].concat(), &Outcome { made: Some(made), ..NONE });
    }

    fn destroy(&mut self, name: &str, dropped: u64) {
        self.call(name, &[dropped], &Outcome { dropped: Some(dropped), ended: &[dropped], ..NONE });
    }

    fn allocate(&mut self, address: u64, bytes: u64) {
        let mut values = NO_VALUES;
        values[1] = bytes;
        self.call("cuMemAlloc_v2+", &[bytes], &Outcome { values: &values, results: &[address], ..NONE });
    }

    fn free(&mut self, address: u64) {
        let mut values = NO_VALUES;
        values[0] = address;
        self.call("cuMemFree_v2+", &[address], &Outcome { values: &values, ..NONE });
    }

    /// Returns the names and words of the steps.
    fn steps(&mut self) -> Vec<(&'static str, Vec<u64>)> {
        let steps = self.log.steps().expect("no obstacle");
        let name = |step: &Step| match step.kind {
            StepKind::Memory => "memory",
            _ => CALLS.get(usize::from(step.op)).map_or("own", |call| call.name),
        };
        steps.iter().map(|step| (name(step), step.words.clone())).collect()
    }

    fn names(&mut self) -> Vec<&'static str> {
        self.steps().into_iter().map(|(name, _)| name).collect()
    }
}

fn find_exact(name: &str) -> usize {
    CALLS.iter().position(|call| call.name == name).expect("described")
}

fn object(kind: Kind, number: u32) -> u64 {
    handle(kind, number)
}

#[test]
fn log_has_objects_that_exist_in_order() {
    let mut program = Program::default();
    let [first, second] = [1, 2].map(|number| object(Kind::Stream, number));
    program.call("cuInit", &[0], &NONE);
    program.create("cuStreamCreate", first, &[0]);
    program.create("cuStreamCreate", second, &[1]);
    program.create("cuEventCreate", object(Kind::Event, 1), &[2]);
    program.call("cuStreamQuery", &[second], &NONE);
    program.destroy("cuStreamDestroy_v2", first);
    let expected =
        [("cuInit", vec![0]), ("cuStreamCreate", vec![second, 1]), ("cuEventCreate", vec![object(Kind::Event, 1), 2])];
    assert_eq!(program.steps(), expected);
}

#[test]
fn memory_is_logged_until_it_is_freed() {
    let mut program = Program::default();
    let at = ADDRESSES.start;
    program.allocate(at, 100);
    program.allocate(at + 512, 200);
    program.free(at);
    assert_eq!(program.steps(), [("memory", vec![at + 512, 200])]);
    program.allocate(at, 300);
    assert_eq!(program.steps().len(), 2);
    let mut values = NO_VALUES;
    values[3] = 7;
    let results = [at + 4096, 512];
    let words = [100, 7, 4];
    program.call("cuMemAllocPitch_v2+", &words, &Outcome { values: &values, results: &results, ..NONE });
    assert_eq!(program.steps().last(), Some(&("memory", vec![at + 4096, 7 * 512])));
}

#[test]
fn memory_outside_chunks_is_an_obstacle_until_it_is_freed() {
    let mut program = Program::default();
    program.allocate(0x7f00_0000_0000, 100);
    assert_eq!(program.log.steps().err(), Some(Obstacle::Placement));
    program.free(0x7f00_0000_0000);
    assert_eq!(program.steps(), []);
}

#[test]
fn later_change_of_the_same_part_replaces_the_earlier_one() {
    let mut program = Program::default();
    let stream = object(Kind::Stream, 1);
    program.create("cuStreamCreate", stream, &[0]);
    for value in 0..3 {
        program.call("cuStreamSetAttribute", &[stream, 1, value, 0, 0, 0, 0, 0, 0, 0], &NONE);
        program.call("cuStreamSetAttribute", &[stream, 3, value, 0, 0, 0, 0, 0, 0, 0], &NONE);
        program.log.described(find_exact("cuCtxSetLimit"), route(0), &[5, value], &NONE);
    }
    let values: Vec<_> = program.steps().into_iter().skip(1).map(|(name, words)| (name, words[1])).collect();
    assert_eq!(values, [("cuStreamSetAttribute", 1), ("cuStreamSetAttribute", 3), ("cuCtxSetLimit", 2)]);
    program.destroy("cuStreamDestroy_v2", stream);
    assert_eq!(program.names(), ["cuCtxSetLimit"]);
    program.call("cuStreamSetAttribute", &[stream, 1, 9, 0, 0, 0, 0, 0, 0, 0], &NONE);
    assert_eq!(program.names(), ["cuCtxSetLimit"], "the stream does not exist");
}

#[test]
fn launchable_graph_keeps_its_graph_as_it_was() {
    let mut program = Program::default();
    let [graph, node, later, exec] =
        [(Kind::Graph, 1), (Kind::Node, 1), (Kind::Node, 2), (Kind::Exec, 1)].map(|(kind, n)| object(kind, n));
    let add = |program: &mut Program, node| {
        let outcome = Outcome { made: Some(node), owner: Some(graph), ..NONE };
        program.call("cuGraphAddEmptyNode", &[node, graph, 0, 0], &outcome);
    };
    program.create("cuGraphCreate", graph, &[0]);
    add(&mut program, node);
    program.create("cuGraphInstantiateWithFlags", exec, &[graph, 0]);
    add(&mut program, later);
    let ended = [graph, node, later];
    program.call("cuGraphDestroy", &[graph], &Outcome { dropped: Some(graph), ended: &ended, ..NONE });
    let names = ["cuGraphCreate", "cuGraphAddEmptyNode", "cuGraphInstantiateWithFlags", "cuGraphDestroy"];
    assert_eq!(program.names(), names, "without the node that was added later");
    program.create("cuGraphCreate", graph, &[0]);
    assert_eq!(program.names().len(), 5, "another graph with the same handle");
    program.destroy("cuGraphExecDestroy", exec);
    assert_eq!(program.names(), ["cuGraphCreate"]);
}

#[test]
fn node_that_was_removed_before_is_removed_again() {
    let mut program = Program::default();
    let [graph, node, exec] = [Kind::Graph, Kind::Node, Kind::Exec].map(|kind| object(kind, 1));
    program.create("cuGraphCreate", graph, &[0]);
    let outcome = Outcome { made: Some(node), owner: Some(graph), ..NONE };
    program.call("cuGraphAddEmptyNode", &[node, graph, 0, 0], &outcome);
    program.create("cuGraphInstantiateWithFlags", exec, &[graph, 0]);
    program.destroy("cuGraphDestroyNode", node);
    let names = ["cuGraphCreate", "cuGraphAddEmptyNode", "cuGraphInstantiateWithFlags", "cuGraphDestroyNode"];
    assert_eq!(program.names(), names);
}

#[test]
fn changes_of_nodes_around_an_instantiation_are_kept() {
    let mut program = Program::default();
    let [graph, node, exec] = [Kind::Graph, Kind::Node, Kind::Exec].map(|kind| object(kind, 1));
    let set = |program: &mut Program, value| program.call("cuGraphMemsetNodeSetParams", &[node, value], &NONE);
    program.create("cuGraphCreate", graph, &[0]);
    let outcome = Outcome { made: Some(node), owner: Some(graph), ..NONE };
    program.call("cuGraphAddMemsetNode", &[node, graph, 0, 0], &outcome);
    set(&mut program, 1);
    program.create("cuGraphInstantiateWithFlags", exec, &[graph, 0]);
    set(&mut program, 2);
    let values: Vec<_> = program.steps().iter().filter(|step| step.0.contains("SetParams")).map(|s| s.1[1]).collect();
    assert_eq!(values, [1, 2]);
    assert_eq!(program.names().last(), Some(&"cuGraphMemsetNodeSetParams"));
}

#[test]
fn object_of_a_destroyed_context_keeps_the_context() {
    let mut program = Program::default();
    let context = object(Kind::Context, 40);
    let stream = object(Kind::Stream, 1);
    program.create("cuCtxCreate_v2+", context, &[0, 0]);
    program.log.described(
        find_exact("cuStreamCreate"),
        route(40),
        &[stream, 0],
        &Outcome { made: Some(stream), ..NONE },
    );
    program.destroy("cuCtxDestroy_v2+", context);
    assert_eq!(program.names(), ["cuCtxCreate_v2+", "cuStreamCreate", "cuCtxDestroy_v2+"]);
    program.destroy("cuStreamDestroy_v2", stream);
    assert_eq!(program.steps(), []);
}

#[test]
fn primary_context_ends_with_its_release() {
    let mut program = Program::default();
    let context = object(Kind::Context, 1);
    program.create("cuDevicePrimaryCtxRetain+", context, &[0]);
    program.log.described(find_exact("cuCtxSetLimit"), route(1), &[5, 1], &NONE);
    assert_eq!(program.names(), ["cuDevicePrimaryCtxRetain+", "cuCtxSetLimit"]);
    program.call("cuDevicePrimaryCtxRelease_v2+", &[0], &Outcome { ended: &[context], ..NONE });
    assert_eq!(program.steps(), []);
}

#[test]
fn references_are_taken_again_and_released() {
    let mut program = Program::default();
    let [first, second] = [1, 2].map(|number| object(Kind::Module, number));
    program.create("cuModuleLoadData+", first, &[0]);
    for _ in 0..2 {
        let outcome = Outcome { made: Some(first), is_known: true, ..NONE };
        program.call("cuModuleLoadData+", &[second, 0], &outcome);
    }
    let kinds = |program: &mut Program| {
        program.log.steps().expect("no obstacle").iter().map(|step| step.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(&mut program), [StepKind::Message, StepKind::Again, StepKind::Again]);
    program.call("cuModuleUnload", &[first], &Outcome { dropped: Some(first), ..NONE });
    assert_eq!(kinds(&mut program), [StepKind::Message, StepKind::Again]);
}

#[test]
fn objects_that_cannot_be_replayed_are_named_until_they_end() {
    let mut program = Program::default();
    let memory = object(Kind::Memory, 1);
    program.create("cuMemCreate", memory, &[4096, 0, 0, 0, 0, 0]);
    let op = |name| Obstacle::Object(u32::try_from(find_exact(name)).expect("small"));
    assert_eq!(program.log.steps().err(), Some(op("cuMemCreate")));
    program.destroy("cuMemRelease", memory);
    assert_eq!(program.steps(), []);
    program.call("cuMemAddressReserve", &[4096, 0, 0, 0], &Outcome { results: &[1 << 45], ..NONE });
    assert_eq!(program.log.steps().err(), Some(op("cuMemAddressReserve")));
    let mut values = NO_VALUES;
    values[0] = 1 << 45;
    program.call("cuMemAddressFree", &[1 << 45, 4096], &Outcome { values: &values, ..NONE });
    assert_eq!(program.steps(), []);
    for (create, end) in [("cuTexObjectCreate", "cuTexObjectDestroy"), ("cuSurfObjectCreate", "cuSurfObjectDestroy")] {
        program.call(create, &[0], &Outcome { results: &[7], ..NONE });
        assert_eq!(program.log.steps().err(), Some(op(create)));
        values[0] = 7;
        program.call(end, &[7], &Outcome { values: &values, ..NONE });
        assert_eq!(program.steps(), []);
    }
    for _ in 0..3 {
        program.call("cuLibraryGetManaged+", &[1, 0], &Outcome { results: &[0x7000, 4], ..NONE });
    }
    assert_eq!(program.log.steps().err(), Some(op("cuLibraryGetManaged+")));
    assert_eq!(program.log.entries.len(), 1);
}

#[test]
fn recorded_events_with_timing_are_an_obstacle() {
    let mut program = Program::default();
    let [timed, plain] = [1, 2].map(|number| object(Kind::Event, number));
    program.create("cuEventCreate", timed, &[0]);
    program.create("cuEventCreate", plain, &[2]);
    program.call("cuEventRecord", &[plain, 0], &NONE);
    assert_eq!(program.names().len(), 2);
    program.call("cuEventRecord", &[timed, 0], &NONE);
    assert_eq!(program.log.steps().err(), Some(Obstacle::Timing));
    program.destroy("cuEventDestroy_v2", timed);
    assert_eq!(program.names(), ["cuEventCreate"]);
}

#[test]
fn address_of_a_variable_is_an_obstacle_until_unload() {
    let mut program = Program::default();
    let module = object(Kind::Module, 1);
    let words = [7, 0];
    let load = |program: &mut Program, image: u64| {
        let outcome = Outcome { made: Some(module), image: (&words, 8), ..NONE };
        program.call("cuModuleLoadData+", &[module, image], &outcome);
    };
    load(&mut program, 1);
    assert_eq!(program.log.steps().expect("no obstacle")[0].image.as_deref().map(|image| image.bytes), Some(8));
    for _ in 0..3 {
        program.call("cuModuleGetGlobal_v2+", &[1, module, 1, 0x61], &NONE);
    }
    assert_eq!(program.log.steps().err(), Some(Obstacle::Addresses));
    assert_eq!(program.log.entries.len(), 2, "a repeated query is not recorded again");
    program.destroy("cuModuleUnload", module);
    assert_eq!(program.steps(), []);
    load(&mut program, 0);
    assert_eq!(program.log.steps().expect("no image")[0].image, None);
}

#[test]
fn pinned_blobs_and_nodes_with_messages_of_their_own_are_logged() {
    let mut program = Program::default();
    program.log.own(own::STAGING, route(1), &[3], None, None);
    program.log.own(own::PIN, route(1), &[4, PINNED_ADDRESSES], None, None);
    program.log.own(own::PIN, route(1), &[5, PINNED_ADDRESSES + 65536], None, None);
    program.log.unpinned(4);
    let ops: Vec<_> = program.log.steps().expect("no obstacle").iter().map(|step| (step.op, step.words[0])).collect();
    assert_eq!(ops, [(own::STAGING, 3), (own::PIN, 5)]);
    let [graph, node] = [Kind::Graph, Kind::Node].map(|kind| object(kind, 1));
    program.create("cuGraphCreate", graph, &[0]);
    program.log.own(own::GRAPH_HOST, route(1), &[own::edit::ADD, graph, node, 7, 0], Some(node), Some(graph));
    program.log.own(own::GRAPH_HOST, route(1), &[own::edit::SET, 0, node, 8, 0], Some(node), Some(0));
    assert_eq!(program.names(), ["own", "own", "cuGraphCreate", "own", "own"]);
    program.call("cuGraphDestroy", &[graph], &Outcome { dropped: Some(graph), ended: &[graph, node], ..NONE });
    assert_eq!(program.names(), ["own", "own"]);
}

#[test]
fn log_of_a_program_that_creates_and_destroys_stays_small() {
    let mut program = Program::default();
    let stream = object(Kind::Stream, 1);
    for number in 0..50_000 {
        program.create("cuStreamCreate", stream, &[0]);
        program.call("cuStreamSetAttribute", &[stream, number, 0, 0, 0, 0, 0, 0, 0, 0], &NONE);
        program.destroy("cuStreamDestroy_v2", stream);
        program.allocate(ADDRESSES.start, 100);
        program.free(ADDRESSES.start);
    }
    assert!(program.log.entries.len() <= MIN_COMPACTED, "{} entries", program.log.entries.len());
    assert_eq!(program.steps(), []);
    assert_eq!((program.log.words, program.log.image_bytes), (0, 0));
}

#[test]
fn program_with_too_many_objects_is_refused_without_a_log() {
    let mut program = Program::default();
    for number in 1..=u32::try_from(MAX_ENTRIES).expect("small") {
        program.create("cuEventCreate", object(Kind::Event, number), &[2]);
    }
    assert_eq!(program.log.steps().err(), Some(Obstacle::Log));
    program.create("cuEventCreate", object(Kind::Event, 1), &[2]);
    assert!(program.log.entries.is_empty());
    assert_eq!(program.log.steps().err(), Some(Obstacle::Log));
}

#[test]
fn steps_of_described_calls_name_the_handles_that_they_create() {
    let mut program = Program::default();
    let stream = object(Kind::Stream, 1);
    program.create("cuStreamCreate", stream, &[0]);
    program.allocate(ADDRESSES.start, 100);
    let steps = program.log.steps().expect("no obstacle");
    let created: Vec<_> = steps.iter().map(created_by).collect();
    assert_eq!(created, [Some((Kind::Stream, stream)), None]);
    assert_eq!(find("cuStreamCreate_ptsz"), Some(find_exact("cuStreamCreate")));
}

/// Creates a program with a stream and a function. Returns the program with the handles of both.
fn capturing() -> (Program, u64, u64) {
    let (mut program, stream) = (Program::default(), object(Kind::Stream, 1));
    let [module, function] = [Kind::Module, Kind::Function].map(|kind| object(kind, 1));
    program.create("cuStreamCreate", stream, &[0]);
    program.create("cuModuleLoadData+", module, &[0]);
    let outcome = Outcome { made: Some(function), owner: Some(module), ..NONE };
    program.call("cuModuleGetFunction", &[function, module, 1, 0x66], &outcome);
    (program, stream, function)
}

impl Program {
    fn begin(&mut self, stream: u64, captures: u64) {
        self.call("cuStreamBeginCapture_v2", &[stream, 0], &Outcome { captures, ..NONE });
    }

    fn work(&mut self, stream: u64, function: u64) {
        self.log.own(own::LAUNCH, route(0), &[function, 0, 0, 0, 0, stream, 0, 0], None, None);
    }

    fn end(&mut self, stream: u64, graph: u64, captures: u64) {
        let outcome = Outcome { made: Some(graph), captures, ..NONE };
        self.call("cuStreamEndCapture", &[stream, graph], &outcome);
    }
}

#[test]
fn capture_is_repeated_while_its_graph_is_used() {
    let (mut program, stream, function) = capturing();
    let [event, graph, exec] = [Kind::Event, Kind::Graph, Kind::Exec].map(|kind| object(kind, 1));
    let captured = Outcome { is_captured: true, captures: 1, ..NONE };
    program.begin(stream, 1);
    program.work(stream, function);
    program.create("cuEventCreate", event, &[2]);
    program.call("cuEventRecord", &[event, stream], &captured);
    program.call("cuStreamWaitEvent", &[object(Kind::Stream, 9), event, 0], &NONE);
    program.destroy("cuEventDestroy_v2", event);
    program.end(stream, graph, 0);
    program.create("cuGraphInstantiateWithFlags", exec, &[graph, 0]);
    program.destroy("cuGraphDestroy", graph);
    let whole = [
        "cuStreamCreate",
        "cuModuleLoadData+",
        "cuModuleGetFunction",
        "cuStreamBeginCapture_v2",
        "own",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventDestroy_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphDestroy",
    ];
    assert_eq!(program.names(), whole);
    assert_eq!(program.names(), whole, "a second restart");
    program.destroy("cuGraphExecDestroy", exec);
    assert_eq!(program.names(), whole[..3]);
}

#[test]
fn open_capture_stays_when_the_log_is_compacted() {
    let (mut program, stream, function) = capturing();
    program.begin(stream, 1);
    program.work(stream, function);
    program.log.compact();
    program.end(stream, object(Kind::Graph, 1), 0);
    assert_eq!(program.names()[3..], ["cuStreamBeginCapture_v2", "own", "cuStreamEndCapture"]);
}

#[test]
fn captures_at_the_same_time_are_repeated_together() {
    let (mut program, stream, function) = capturing();
    let other = object(Kind::Stream, 2);
    program.create("cuStreamCreate", other, &[0]);
    let graphs = [1, 2, 3].map(|number| object(Kind::Graph, number));
    program.begin(stream, 1);
    program.begin(other, 2);
    program.work(stream, function);
    program.end(stream, graphs[0], 1);
    program.end(other, graphs[1], 0);
    program.begin(stream, 1);
    program.end(stream, graphs[2], 0);
    program.destroy("cuGraphDestroy", graphs[1]);
    let begin = "cuStreamBeginCapture_v2";
    let (end, destroy) = ("cuStreamEndCapture", "cuGraphDestroy");
    assert_eq!(program.names()[4..], [begin, begin, "own", end, end, begin, end, destroy]);
    program.destroy("cuGraphDestroy", graphs[0]);
    assert_eq!(program.names()[4..], [begin, end], "no graph of the first captures is left");
}

#[test]
fn graph_of_a_capture_that_cannot_be_repeated_is_an_obstacle() {
    let refused = Some(Obstacle::Object(find_exact("cuStreamEndCapture") as u32));
    let mut values = NO_VALUES;
    values[1] = 64;
    let results = [ADDRESSES.start];
    let captured = Outcome { is_captured: true, captures: 1, values: &values, results: &results, ..NONE };
    for breaks in [
        |program: &mut Program, captured: &Outcome<'_>| {
            program.call("cuMemAllocAsync+", &[64, object(Kind::Stream, 1)], captured);
        },
        |program: &mut Program, captured: &Outcome<'_>| {
            program.call("cuMemFreeAsync", &[64, object(Kind::Stream, 1)], captured);
        },
        |program: &mut Program, _: &Outcome<'_>| program.log.break_captures(),
    ] {
        let (mut program, stream, _) = capturing();
        let graph = object(Kind::Graph, 1);
        program.begin(stream, 1);
        breaks(&mut program, &captured);
        program.end(stream, graph, 0);
        assert_eq!(program.log.steps().err(), refused);
        program.destroy("cuGraphDestroy", graph);
        assert!(program.log.steps().is_ok());
        program.begin(stream, 1);
        program.end(stream, graph, 0);
        assert!(program.log.steps().is_ok(), "the next capture can be repeated");
    }
}

#[test]
fn captured_work_keeps_the_attributes_that_it_had() {
    let (mut program, stream, function) = capturing();
    let set = |program: &mut Program, value| program.call("cuFuncSetAttribute+", &[function, 8, value], &NONE);
    let values = |program: &mut Program| {
        let steps = program.steps().into_iter().filter(|(name, _)| *name == "cuFuncSetAttribute+");
        steps.map(|(_, words)| words[2]).collect::<Vec<_>>()
    };
    set(&mut program, 1);
    set(&mut program, 2);
    program.begin(stream, 1);
    program.work(stream, function);
    program.end(stream, object(Kind::Graph, 1), 0);
    set(&mut program, 3);
    set(&mut program, 4);
    assert_eq!(values(&mut program), [2, 4]);
}

#[test]
fn captured_records_have_no_times_except_external_ones() {
    for (flags, obstacle) in [(0, None), (1, Some(Obstacle::Timing))] {
        let (mut program, stream, _) = capturing();
        let event = object(Kind::Event, 1);
        program.create("cuEventCreate", event, &[0]);
        program.begin(stream, 1);
        let captured = Outcome { is_captured: true, captures: 1, ..NONE };
        program.call("cuEventRecordWithFlags", &[event, stream, flags], &captured);
        program.end(stream, object(Kind::Graph, 1), 0);
        assert_eq!(program.log.steps().err(), obstacle, "flags {flags}");
    }
}

#[test]
fn captures_that_need_each_other_are_found_in_few_searches() {
    let (mut program, stream, _) = capturing();
    let other = object(Kind::Stream, 2);
    program.create("cuStreamCreate", other, &[0]);
    let captured = Outcome { is_captured: true, captures: 1, ..NONE };
    // In each pair, the capture that ends last launches the graph of the capture that ended first in the previous pair.
    let mut last = None;
    for number in 1..100 {
        let [first, second] = [2 * number, 2 * number + 1].map(|number| object(Kind::Graph, number));
        let exec = object(Kind::Exec, number);
        program.begin(stream, 1);
        program.begin(other, 2);
        program.end(stream, first, 1);
        if let Some(before) = last.replace(exec) {
            program.call("cuGraphLaunch", &[before, other], &captured);
        }
        program.end(other, second, 0);
        program.create("cuGraphInstantiateWithFlags", exec, &[first, 0]);
        program.destroy("cuGraphDestroy", first);
        program.destroy("cuGraphDestroy", second);
    }
    for number in 1..99 {
        program.destroy("cuGraphExecDestroy", object(Kind::Exec, number));
    }
    let launches = program.names().into_iter().filter(|name| *name == "cuGraphLaunch").count();
    assert_eq!(launches, 98, "each graph needs the one before");
    program.destroy("cuGraphExecDestroy", object(Kind::Exec, 99));
    assert!(!program.names().contains(&"cuStreamEndCapture"));
}
