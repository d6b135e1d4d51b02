//! Tests the order of the requests, and which owner has the tenant after any request has failed.

use std::cell::{Cell, RefCell};

use cuda_control::{Answer, MemoryShare, Request, Tenant, TenantView, TimeShare};

use super::*;

/// An owner with at most one tenant. The tenant's only program, if any, is this process.
struct Fake<'a> {
    name: &'static str,
    /// Log of requests to both owners.
    log: &'a RefCell<Vec<String>>,
    /// Number of requests before the one that fails, and true if it fails with [`Trouble::Absent`].
    fails_in: &'a Cell<Option<(u32, bool)>>,
    tenant: Cell<Option<bool>>,
    has_left: Cell<bool>,
    has_reconnected: Cell<bool>,
    /// Name of the owner that listens on the tenant's socket. Both owners share this value.
    socket: &'a Cell<&'static str>,
}

impl Owner for Fake<'_> {
    fn ask(&self, request: Request) -> Result<Answer, Trouble> {
        let kind = format!("{request:?}");
        let kind = kind.split(['(', ' ']).next().unwrap_or_default().to_owned();
        self.log.borrow_mut().push(format!("{}.{kind}", self.name));
        if let Some((left, absent)) = self.fails_in.get() {
            self.fails_in.set(left.checked_sub(1).map(|left| (left, absent)));
            if left == 0 {
                let why = "it fails".to_owned();
                return Err(if absent { Trouble::Absent(why) } else { Trouble::Refused(why) });
            }
        }
        let unknown = || Trouble::Refused("there is no tenant `a`".to_owned());
        let knows = self.tenant.get().ok_or_else(unknown);
        Ok(match request {
            Request::View { .. } => {
                let mut card = Card { uuid: format!("GPU-{}", self.name), ..Card::default() };
                if knows.is_ok() {
                    let programs = vec![(std::process::id(), "test".to_owned())];
                    let tenant = TenantView { name: "a".to_owned(), programs, ..TenantView::default() };
                    card.tenants.insert(sched::TenantId(1), tenant);
                }
                Answer::View(Box::new(card))
            }
            Request::MayLeave { to, .. } => {
                knows?;
                assert_eq!(to, "GPU-to");
                match self.has_reconnected.replace(true) {
                    false => Answer::Moving("a process has not reconnected".to_owned()),
                    true => Answer::Done,
                }
            }
            Request::Add(tenant) => {
                if knows.is_ok() {
                    return Err(Trouble::Refused("tenant `a` already exists".to_owned()));
                }
                self.tenant.set(Some(tenant.arrives));
                if !tenant.arrives {
                    self.socket.set(self.name);
                }
                Answer::Done
            }
            Request::Leave(_) => {
                knows?;
                match self.has_left.replace(true) {
                    false => Answer::Moving("memory is on the card".to_owned()),
                    true => Answer::Left(vec![std::process::id()]),
                }
            }
            Request::Stay(_) => {
                knows?;
                self.has_left.set(false);
                Answer::Done
            }
            Request::Arrive { .. } => {
                knows?;
                self.tenant.set(Some(false));
                self.socket.set(self.name);
                Answer::Done
            }
            Request::Arrivals(_) => {
                knows?;
                let here = if self.socket.get() == self.name { vec![std::process::id()] } else { Vec::new() };
                Answer::Arrived { here, failed: None, times: Vec::new() }
            }
            Request::Remove { .. } => {
                self.has_left.set(false);
                self.tenant.set(None);
                Answer::Done
            }
            other => panic!("{other:?}"),
        })
    }
}

fn tenant() -> Tenant {
    let memory = MemoryShare { quota: None, guarantee: 0, swap_cap: None, weight: 100, on_full: "swap".to_owned() };
    let time = TimeShare {
        weight: 100,
        guarantee_permille: 0,
        cap_permille: 1000,
        class: "normal".to_owned(),
        max_run_ns: None,
    };
    Tenant {
        name: "a".to_owned(),
        memory_bytes: 64 << 20,
        window_bytes: 0,
        memory,
        time,
        suspends: false,
        socket: "socket".into(),
        mode: 0o600,
        uid: None,
        gid: None,
        share_group: None,
        sharing: Default::default(),
        gang: None,
        arrives: false,
    }
}

/// Moves a tenant. Request number `fails_in` fails. Returns the result, the owners that have the tenant, the owner that
/// listens, and the requests.
fn moved(fails_in: Option<(u32, bool)>) -> (Result<Carried, Failure>, [bool; 2], &'static str, Vec<String>) {
    let (log, fails_in, socket) = (RefCell::default(), Cell::new(fails_in), Cell::new("from"));
    let owner = |name, tenant| Fake {
        name,
        log: &log,
        fails_in: &fails_in,
        tenant: Cell::new(tenant),
        has_left: Cell::new(false),
        has_reconnected: Cell::new(false),
        socket: &socket,
    };
    let (from, to, tenant) = (owner("from", Some(false)), owner("to", None), tenant());
    let done = carry_over(Plan { from: &from, to: &to, here: &tenant, there: &tenant });
    let has = [&from, &to].map(|owner| owner.tenant.get() == Some(false) && !owner.has_left.get());
    (done, has, socket.get(), log.take())
}

#[test]
fn tenant_leaves_one_owner_before_the_other_one_listens() {
    let (done, has, socket, log) = moved(None);
    assert_eq!(done.map(|carried| carried.programs), Ok(1));
    assert_eq!((has, socket), ([false, true], "to"));
    let expected = [
        "to.View",
        "from.MayLeave",
        "from.MayLeave",
        "from.View",
        "to.Add",
        "from.Leave",
        "from.Leave",
        "to.Arrive",
        "from.Remove",
        "to.Arrivals",
    ];
    assert_eq!(log, expected);
}

#[test]
fn failed_request_leaves_tenant_with_the_owner_that_listens() {
    let all = u32::try_from(moved(None).3.len()).expect("few");
    for absent in [false, true] {
        for step in 0..all {
            let (done, has, socket, log) = moved(Some((step, absent)));
            // The last request only queries progress, and a restarted owner continues.
            if absent && step == all - 1 {
                assert_eq!((has, socket), ([false, true], "to"), "{log:?}");
                assert!(done.is_ok(), "{log:?}");
                continue;
            }
            assert_eq!(done, Err(Failure::Stays("it fails".to_owned())), "{step}: {log:?}");
            assert_eq!((has, socket), ([true, false], "from"), "{step}: {log:?}");
        }
    }
}

#[test]
fn phases_are_those_of_the_program_that_arrived_last() {
    let times = |checkpoint_us, restore_us, arrive_us| {
        let pid = std::process::id();
        ArrivalTimes { pid, checkpoint_us, restore_us, arrive_us, chunks: 1 }
    };
    let mut phases = Phases { leave: Duration::from_millis(7), ..Phases::default() };
    phases.arrived(&[times(90_000, 80_000, 200_000), times(200_000, 300_000, 650_000)], Duration::from_millis(700));
    let text = "eviction 7 ms; connection 50 ms, checkpoint 200 ms, restore 300 ms, chunks 150 ms";
    assert_eq!(phases.to_string(), text);
    phases.arrived(&[], Duration::from_millis(1));
    assert_eq!(phases.to_string(), text, "a tenant without programs");
}

/// Moves a VM. Request number `fails_in` fails; `carry` is the result of moving its programs. Returns the result, the
/// owners that have the tenant, and the requests.
fn moved_vm(
    fails_in: Option<(u32, bool)>,
    carry: Result<(usize, Duration), String>,
) -> (Result<Carried, Failure>, [bool; 2], Vec<String>) {
    let (log, fails_in, socket) = (RefCell::default(), Cell::new(fails_in), Cell::new("from"));
    let owner = |name, tenant| Fake {
        name,
        log: &log,
        fails_in: &fails_in,
        tenant: Cell::new(tenant),
        has_left: Cell::new(false),
        has_reconnected: Cell::new(false),
        socket: &socket,
    };
    let (from, to, tenant) = (owner("from", Some(false)), owner("to", None), tenant());
    let done = carry_vm(VmPlan { from: &from, to: &to, there: &tenant }, |_| {
        log.borrow_mut().push("carry".to_owned());
        carry
    });
    let has = [&from, &to].map(|owner| owner.tenant.get().is_some());
    (done, has, log.take())
}

#[test]
fn both_owners_have_a_vm_while_its_programs_move() {
    let pause = Duration::from_millis(7);
    let (done, has, log) = moved_vm(None, Ok((2, pause)));
    assert_eq!(done, Ok(Carried { programs: 2, bytes: 0, pause, phases: Phases::default() }));
    assert_eq!(has, [false, true]);
    assert_eq!(log, ["from.View", "to.View", "to.Add", "carry", "from.Remove"]);
}

#[test]
fn vm_whose_programs_stay_is_removed_from_the_other_card() {
    let (done, has, log) = moved_vm(None, Err("it has an array".to_owned()));
    assert_eq!((done, has), (Err(Failure::Stays("it has an array".to_owned())), [true, false]));
    assert_eq!(log.last().map(String::as_str), Some("to.Remove"));
}

#[test]
fn failed_request_leaves_a_vm_with_one_owner() {
    let carried = || Ok((1, Duration::ZERO));
    for absent in [false, true] {
        for step in 0..4 {
            let (done, has, log) = moved_vm(Some((step, absent)), carried());
            if step < 3 {
                assert_eq!(done, Err(Failure::Stays("it fails".to_owned())), "{step}: {log:?}");
                assert_eq!(has, [true, false], "{step}: {log:?}");
                assert!(!log.contains(&"carry".to_owned()), "{step}: {log:?}");
                continue;
            }
            // The programs have moved. The request to the first owner is retried while no owner responds.
            assert!(done.is_ok(), "{log:?}");
            assert_eq!(has, [!absent, true], "{log:?}");
        }
    }
}
