//! Tests groups of tenants whose programs use the card concurrently.

use super::*;
use cuda_control::{Incident, ServerState};
use cuda_mps::Report;
use sched::groups::Sharing;

fn group(name: &str, sharing: Sharing) -> TenantSpec {
    let share_group = Some(ShareGroup { name: "group".to_owned(), sharing, user: None });
    TenantSpec { share_group, ..spec(name, 64, Limits::default()) }
}

/// Creates a card with the tenants `one` and `two` in one group, and `three` outside the group.
fn world(sharing: Sharing) -> World {
    let mut world = World::new(16, 16);
    world.core.add_tenant(group("one", sharing)).expect("the request is valid");
    world.core.add_tenant(group("two", sharing)).expect("the request is valid");
    world.core.add_tenant(spec("three", 64, Limits::default())).expect("the request is valid");
    world
}

/// Connects a program that is a client of the group's MPS server.
fn client(world: &mut World, tenant: &str) -> SessionId {
    let session = world.connect(tenant);
    world.say(session, FromTenant::Concurrent { card: 0 });
    let clients = world.core.servers.clients("group").into_iter().chain([pid(world, session)]).collect();
    report(world, Report::Clients { servers: BTreeSet::from([7]), clients });
    session
}

fn pid(world: &World, session: SessionId) -> u32 {
    world.core.sessions[&session].pid
}

/// Reports a change of the group's server.
fn report(world: &mut World, report: Report) {
    world.event(Event::Mps { group: "group".to_owned(), report });
    world.settle();
}

fn want(world: &mut World, sessions: &[SessionId]) {
    for &session in sessions {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.settle();
}

fn runs(world: &World, session: SessionId) -> bool {
    world.programs[&session].run.is_some()
}

/// Reports the use of all open gates while time passes. Returns the time in ms during which several sessions' gates
/// were open concurrently, and the time during which each gate was open.
fn observe(world: &mut World, sessions: &[SessionId], ms: u64) -> (u64, Vec<u64>) {
    let (mut both, mut each) = (0, vec![0; sessions.len()]);
    for _ in 0..ms / 2 {
        world.pass(2 * MS);
        world.check();
        let open: Vec<bool> = sessions.iter().map(|&session| runs(world, session)).collect();
        both += if open.iter().filter(|is_open| **is_open).count() > 1 { 2 } else { 0 };
        for (at, &session) in sessions.iter().enumerate().filter(|(at, _)| open[*at]) {
            each[at] += 2;
            let usage = Usage { busy_ns: 2 * MS, copy_ns: 0, launches: 20 };
            let turn = world.programs[&session].run.expect("it runs").turn;
            world.say(session, FromTenant::Used { card: 0, turn, usage });
        }
        want(world, sessions);
    }
    (both, each)
}

#[test]
fn programs_of_one_group_have_open_gates_at_once() {
    let mut world = world(Sharing::Together);
    let one = client(&mut world, "one");
    let three = world.connect("three");
    want(&mut world, &[one]);
    let terms = world.programs[&one].run.expect("it runs");
    assert!(terms.run_ahead_us > 0 && terms.report_us == 0, "no other member has programs: {terms:?}");
    let two = client(&mut world, "two");
    world.leave(three);
    want(&mut world, &[one, two]);
    let (both, each) = observe(&mut world, &[one, two], 1000);
    assert!(both >= 800, "{both} ms together");
    assert!(each.iter().all(|ms| *ms >= 850), "{each:?}");
    let terms = world.programs[&one].run.expect("it runs");
    assert!(terms.run_ahead_us > 0 && terms.report_us > 0, "its use is measured and reported: {terms:?}");
    let charged: Vec<u64> = {
        let view = world.core.view(0);
        (0..view.tenants.len()).map(|at| view.charged_ns(at) / MS).collect()
    };
    assert!(charged[0] + charged[1] > 1500, "each is charged for its own work: {charged:?}");
}

#[test]
fn group_and_single_tenant_take_turns() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    let three = world.connect("three");
    want(&mut world, &[one, two, three]);
    // `World::check` fails if the gates of the group and of the other tenant are open concurrently.
    let (_, each) = observe(&mut world, &[one, two, three], 2000);
    assert!((550..=800).contains(&each[2]), "the group has the weights of both: {each:?}");
    assert!(each[0].abs_diff(each[1]) <= 150, "{each:?}");
}

#[test]
fn program_that_is_no_mps_client_has_exclusive_turns() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), world.connect("two"));
    want(&mut world, &[one, two]);
    let (both, each) = observe(&mut world, &[one, two], 1000);
    assert_eq!(both, 0);
    assert!(each.iter().all(|ms| *ms >= 350), "{each:?}");
    let view = world.core.view(0);
    let names: Vec<&str> = view.tenants[1].not_concurrent.iter().map(|(_, program)| program.as_str()).collect();
    assert_eq!(names, ["test"]);
    assert!(view.tenants[0].membership.is_some_and(|state| state.joined));
    assert!(view.tenants[1].membership.is_some_and(|state| !state.joined));
    // The tenant takes part in the group as soon as this program has exited.
    world.leave(two);
    let two = client(&mut world, "two");
    want(&mut world, &[one, two]);
    assert!(observe(&mut world, &[one, two], 500).0 >= 350);
}

#[test]
fn strictest_mode_of_members_applies_and_changes_live() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    observe(&mut world, &[one, two], 100);
    let id = world.core.tenant("two").expect("there");
    world.core.change_tenant(id, &group("two", Sharing::Turns)).expect("the request is valid");
    observe(&mut world, &[one, two], 100);
    assert_eq!(observe(&mut world, &[one, two], 500).0, 0);
    world.core.change_tenant(id, &group("two", Sharing::Together)).expect("the request is valid");
    assert!(observe(&mut world, &[one, two], 500).0 >= 350);
    world.core.change_tenant(id, &spec("two", 64, Limits::default())).expect("the request is valid");
    observe(&mut world, &[one, two], 100);
    assert_eq!(observe(&mut world, &[one, two], 500).0, 0, "the tenant has left the group");
}

#[test]
fn relocation_quiesces_only_member_with_moving_chunks() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    world.ask(one, 1, 4);
    world.ask(two, 1, 4);
    world.write(one);
    world.write(two);
    want(&mut world, &[one, two]);
    observe(&mut world, &[one, two], 200);
    assert!(runs(&world, one) && runs(&world, two));
    let before = world.programs[&two].run.expect("it runs").turn;
    // The quota of `one` is reduced, so its chunks move to host memory.
    let id = world.core.tenant("one").expect("there");
    let lower = TenantSpec { limits: Limits { quota: 2, ..Limits::default() }, ..group("one", Sharing::Together) };
    world.core.change_tenant(id, &lower).expect("the request is valid");
    world.event(Event::Tick);
    let mut quiet = false;
    for choice in 0..200 {
        if !world.step(choice) {
            break;
        }
        quiet |= world.programs[&one].quiet.is_some();
        assert!(world.programs[&two].quiet.is_none() && runs(&world, two), "the other member runs");
    }
    assert!(quiet, "chunks were moved");
    world.pass(20 * MS);
    world.check();
    assert_eq!(world.places(one), (2, 2));
    assert!(world.programs[&two].run.is_some_and(|run| run.turn >= before));
}

#[test]
fn members_get_exclusive_time_when_they_fall_behind() {
    let mut world = world(Sharing::Together);
    let id = world.core.tenant("one").expect("there");
    let heavy = TenantSpec { time: sched::VgpuParams::weight(300), ..group("one", Sharing::Together) };
    world.core.change_tenant(id, &heavy).expect("the request is valid");
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    let (_, each) = observe(&mut world, &[one, two], 2000);
    assert!(each[0] >= 1900 && each[1] < 1100, "{each:?}");
    let charged: Vec<u64> = {
        let view = world.core.view(0);
        (0..view.tenants.len()).map(|at| view.charged_ns(at)).collect()
    };
    let part = charged[0] as f64 / (charged[0] + charged[1]) as f64;
    assert!((part - 0.75).abs() < 0.03, "{charged:?}");
}

#[test]
fn ended_member_leaves_the_card_to_others() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    observe(&mut world, &[one, two], 50);
    world.leave(one);
    let (_, each) = observe(&mut world, &[two], 200);
    assert!(each[0] >= 190, "{each:?}");
    let id = world.core.tenant("one").expect("there");
    world.core.remove_tenant(id).expect("the tenant has no programs");
    assert!(observe(&mut world, &[two], 100).1[0] >= 90);
}

#[test]
fn waiting_program_yields_its_turn_to_another_tenant() {
    let mut world = two(8, 8);
    let (one, other) = (world.connect("one"), world.connect("two"));
    world.say(one, FromTenant::Waiting { card: 0 });
    world.say(other, FromTenant::Waiting { card: 0 });
    world.pass(5 * MS);
    let run = world.programs[&one].run.expect("it runs");
    assert_eq!(world.programs[&one].yields, Some(run.turn));
    // The program waits for a result, and submits more work after its gate has closed.
    world.programs.get_mut(&one).expect("there").run = None;
    world.say(one, FromTenant::Stopped { card: 0, turn: run.turn, usage: Usage::default(), waiting: true });
    assert!(runs(&world, other) && !runs(&world, one));
    world.pass(40 * MS);
    assert!(runs(&world, one) || runs(&world, other));
    world.check();
    // Shims with an older protocol version do not get requests to yield.
    let mut world = two(8, 8);
    world.version = cuda_protocol::VERSION_RECLAIM;
    let (one, other) = (world.connect("one"), world.connect("two"));
    world.say(one, FromTenant::Waiting { card: 0 });
    world.say(other, FromTenant::Waiting { card: 0 });
    world.pass(10 * MS);
    assert_eq!(world.programs[&one].yields, None);
}

#[test]
fn repeated_report_of_a_client_causes_one_poll() {
    let mut world = world(Sharing::Together);
    let session = world.connect("one");
    world.core.take_actions();
    for _ in 0..10 {
        let message = FromTenant::Concurrent { card: 0 };
        world.core.handle(world.now, Event::Said { session, message, pieces: Vec::new() });
    }
    let polls = world.core.take_actions().iter().filter(|action| matches!(action, Action::PollServer { .. })).count();
    assert_eq!(polls, 1);
}

#[test]
fn program_that_only_says_it_is_a_client_takes_turns() {
    let mut world = world(Sharing::Together);
    let one = client(&mut world, "one");
    let liar = world.connect("two");
    world.say(liar, FromTenant::Concurrent { card: 0 });
    want(&mut world, &[one, liar]);
    let (both, _) = observe(&mut world, &[one, liar], 400);
    assert_eq!(both, 0, "the server does not list it");
    let view = world.core.view(0);
    assert_eq!(view.tenants[1].not_concurrent, [(pid(&world, liar), "test".to_owned())]);
    let clients = BTreeSet::from([pid(&world, one), pid(&world, liar)]);
    report(&mut world, Report::Clients { servers: BTreeSet::from([7]), clients });
    let (both, _) = observe(&mut world, &[one, liar], 400);
    assert!(both > 200, "{both} ms together");
}

#[test]
fn lost_server_is_reported_with_its_programs() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    let pids = [pid(&world, one), pid(&world, two)];
    // One of the programs exits before the owner learns the reason.
    world.leave(two);
    report(&mut world, Report::Lost { clients: BTreeSet::from(pids), why: "it ended".to_owned() });
    report(&mut world, Report::Unavailable { why: "it exited; it will be restarted".to_owned() });
    let incidents = world.core.take_incidents();
    let [Incident { tenant, action: cuda_control::Action::ServerEnded { why, programs } }] = &incidents[..] else {
        panic!("{incidents:?}")
    };
    assert_eq!((tenant.as_str(), why.as_str()), ("group", "it ended"));
    let named: Vec<_> = programs.iter().map(|one| (one.pid, one.program.as_str())).collect();
    assert_eq!(named, pids.map(|pid| (pid, "test")));
    assert!(
        matches!(&world.core.view(0).tenants[0].server, ServerState::Unavailable(why) if why.contains("restarted"))
    );
    report(&mut world, Report::Serves { again: true });
    assert_eq!(world.core.view(0).tenants[0].server, ServerState::Serves);
    assert!(!world.core.sessions[&one].concurrent, "it is not a client of the new server");
}

#[test]
fn server_is_needed_while_no_member_insists_on_turns() {
    let mut core = Core::new(CardConfig::new(16 * CHUNK), 1).expect("good settings");
    let servers = |core: &mut Core| -> Vec<Action> {
        let is_of_server = |action: &Action| {
            matches!(action, Action::StartServer { .. } | Action::RetireServer { .. } | Action::PollServer { .. })
        };
        core.take_actions().into_iter().filter(is_of_server).collect()
    };
    let start = |user| [Action::StartServer { group: "group".to_owned(), user }];
    let retire = [Action::RetireServer { group: "group".to_owned() }];
    let of = |name: &str, sharing, user| {
        let share_group = Some(ShareGroup { name: "group".to_owned(), sharing, user });
        TenantSpec { share_group, ..spec(name, 1, Limits::default()) }
    };
    let one = core.add_tenant(of("one", Sharing::Auto, Some(5))).expect("it may be");
    assert_eq!(servers(&mut core), start(Some(5)));
    let two = core.add_tenant(of("two", Sharing::Turns, Some(5))).expect("it may be");
    assert_eq!(servers(&mut core), retire);
    core.handle(1, Event::Mps { group: "group".to_owned(), report: Report::Serves { again: false } });
    assert_eq!(core.view(0).tenants[0].server, ServerState::Unused, "it only serves its clients");
    core.change_tenant(two, &of("two", Sharing::Together, Some(5))).expect("it may be");
    assert_eq!(servers(&mut core), start(Some(5)));
    core.add_tenant(of("three", Sharing::Together, Some(6))).expect("it may be");
    assert_eq!(servers(&mut core), retire, "a server has one user");
    let why = "the group's tenants have different `owner`s, and an MPS server serves one user";
    assert_eq!(core.view(0).tenants[0].server, ServerState::Unavailable(why.to_owned()));
    let three = core.tenant("three").expect("it exists");
    for id in [three, two, one] {
        core.remove_tenant(id).expect("it has no programs");
    }
    let last = servers(&mut core);
    assert_eq!(last.last(), retire.last(), "{last:?}");
    core.handle(1, Event::Mps { group: "group".to_owned(), report: Report::Retired });
    assert_eq!(core.servers.count(), 0);
}

#[test]
fn mps_server_is_not_a_stranger() {
    let mut world = world(Sharing::Together);
    world.core.set_on_stranger(OnStranger::Kill);
    client(&mut world, "one");
    let user = |pid| User { pid, program: "nvidia-cuda-mps".to_owned(), bytes: None, occupies: true };
    for _ in 0..3 {
        world.event(Event::Users { users: vec![user(7), user(8)], own: None });
    }
    let strangers: Vec<u32> = world.core.strangers().map(|stranger| stranger.pid).collect();
    assert_eq!(strangers, [8], "7 is the group's server");
}

#[test]
fn submission_longer_than_report_interval_counts_in_full() {
    let mut world = world(Sharing::Together);
    let (one, _two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one]);
    let busy = |world: &World| world.core.view(0).tenants[0].busy_ns;
    // In each round, two submissions of 3 ms end: 1 ms after the first report, and at the time of the third.
    for round in 1..=20 {
        for busy_ns in [0, 3 * MS, 3 * MS] {
            world.pass(2 * MS);
            let usage = Usage { busy_ns, copy_ns: 0, launches: u32::from(busy_ns > 0) };
            let turn = world.programs[&one].run.expect("it runs").turn;
            world.say(one, FromTenant::Used { card: 0, turn, usage });
        }
        assert_eq!(busy(&world), 6 * MS * round);
    }
    let usage = Usage { busy_ns: u64::MAX, copy_ns: 0, launches: 1 };
    let turn = world.programs[&one].run.expect("it runs").turn;
    world.say(one, FromTenant::Used { card: 0, turn, usage });
    assert_eq!(busy(&world), 120 * MS, "no more than the time for which the gate was open");
}

#[test]
fn kill_of_mps_client_says_that_server_must_end_its_work() {
    let mut world = world(Sharing::Together);
    let sessions = [client(&mut world, "one"), world.connect("three")];
    want(&mut world, &sessions);
    let kills = sessions.map(|session| {
        world.core.give_up(session, Reason::Turn);
        let kill = world.core.take_actions().into_iter().find_map(|action| match action {
            Action::Kill { session: of, is_client, .. } if of == session => Some(is_client),
            _ => None,
        });
        kill.expect("it is killed")
    });
    assert_eq!(kills, [true, false]);
}

/// Returns the longest time in ms during which a program's gate stays closed within the next `ms` milliseconds. All
/// other programs with open gates report work.
fn longest_gap(world: &mut World, session: SessionId, others: &[SessionId], ms: u64) -> u64 {
    let (mut gap, mut longest) = (0, 0);
    for _ in 0..ms / 2 {
        observe(world, others, 2);
        gap = if runs(world, session) { 0 } else { gap + 2 };
        longest = longest.max(gap);
    }
    longest
}

/// Creates two members of a group and a tenant outside it, all with work. Both members' gates are open.
fn members_with_open_gates() -> (World, [SessionId; 3]) {
    let mut world = world(Sharing::Together);
    let sessions = [client(&mut world, "one"), client(&mut world, "two"), world.connect("three")];
    observe(&mut world, &sessions, 1000);
    let both_run = (0..1000).any(|_| {
        observe(&mut world, &sessions, 2);
        runs(&world, sessions[0]) && runs(&world, sessions[1])
    });
    assert!(both_run);
    (world, sessions)
}

#[test]
fn stopped_member_delays_its_group_for_moments() {
    let (mut world, [one, two, three]) = members_with_open_gates();
    world.programs.get_mut(&one).expect("there").stopped = true;
    let gap = longest_gap(&mut world, two, &[two, three], 3_000);
    assert!(gap <= 150, "{gap} ms");
    // The member returns its turn when it runs again, and then gets its share.
    let charged = world.core.view(0).charged_ns(0);
    world.programs.get_mut(&one).expect("it is not killed").stopped = false;
    world.settle();
    observe(&mut world, &[one, two, three], 2000);
    assert!(world.core.view(0).charged_ns(0) > charged + 300 * MS);
}

/// Makes NVML list the processes. Only `occupant` occupies the card.
fn occupy(world: &mut World, occupant: SessionId) {
    let occupant = pid(world, occupant);
    let pids: Vec<u32> = world.core.sessions.values().map(|session| session.pid).collect();
    let user = |pid| User { pid, program: String::new(), bytes: None, occupies: pid == occupant };
    world.event(Event::Users { users: pids.into_iter().map(user).collect(), own: None });
    world.settle();
}

#[test]
fn member_that_waits_behind_an_endless_kernel_is_not_killed() {
    let (mut world, [one, two, three]) = members_with_open_gates();
    // The kernel of the second program is endless, and fills the card.
    for session in [one, two] {
        world.programs.get_mut(&session).expect("there").mute = true;
    }
    for _ in 0..110 {
        occupy(&mut world, two);
        observe(&mut world, &[three], 100);
        if !world.programs.contains_key(&two) {
            break;
        }
    }
    assert!(!world.programs.contains_key(&two), "its limit has passed");
    assert!(world.programs.contains_key(&one), "it only waited");
    world.programs.get_mut(&one).expect("there").mute = false;
    world.settle();
    // The group has been charged for the kernel, so the other tenant has the card first.
    let gap = longest_gap(&mut world, one, &[one, three], 10_000);
    assert!(gap < 3_000, "{gap} ms");
}
