use cuda_calls::find;

use super::*;

/// A program with a log, whose calls succeed.
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
fn changes_of_nodes_before_and_after_the_launchable_graph_are_kept() {
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
fn objects_that_cannot_be_created_again_are_named_until_they_end() {
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
        program.call("cuModuleGetGlobal_v2+", &[1, 0], &Outcome { results: &[0x7000, 4], ..NONE });
    }
    assert_eq!(program.log.steps().err(), Some(op("cuModuleGetGlobal_v2+")));
    assert_eq!(program.log.entries.len(), 1);
}

#[test]
fn captured_graph_is_an_obstacle_while_a_launchable_one_needs_it() {
    let mut program = Program::default();
    let [stream, graph, exec] = [Kind::Stream, Kind::Graph, Kind::Exec].map(|kind| object(kind, 1));
    program.create("cuStreamCreate", stream, &[0]);
    program.call("cuStreamEndCapture", &[stream, graph], &Outcome { made: Some(graph), ..NONE });
    program.create("cuGraphInstantiateWithFlags", exec, &[graph, 0]);
    program.destroy("cuGraphDestroy", graph);
    assert!(matches!(program.log.steps(), Err(Obstacle::Object(_))));
    program.destroy("cuGraphExecDestroy", exec);
    assert_eq!(program.names(), ["cuStreamCreate"]);
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
fn module_with_variables_is_an_obstacle_while_it_is_loaded() {
    let mut program = Program::default();
    let module = object(Kind::Module, 1);
    let text = *b".global .u32 n;\0";
    let words: Vec<u64> = text.chunks(8).map(|part| part.iter().rev().fold(0, |w, b| w << 8 | u64::from(*b))).collect();
    let load = |program: &mut Program, image: u64| {
        let outcome = Outcome { made: Some(module), image: (&words, 15), ..NONE };
        program.call("cuModuleLoadData+", &[module, image], &outcome);
    };
    load(&mut program, 1);
    assert_eq!(program.log.steps().err(), Some(Obstacle::Variables));
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
fn program_with_too_many_objects_is_refused_and_its_log_is_freed() {
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
