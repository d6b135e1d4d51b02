//! Tests programs that use more memory or time than they report. The owner must detect, charge and report the excess.

use std::time::Duration;

use cuda_protocol::{FromOwner, FromTenant, Refusal};
use serde_json::Value;

use super::support::hostile::*;
use super::support::{Program, Rig, built, owner};

/// Owner arguments for a third tenant with 16 MiB.
const SMALL: [&str; 2] = ["--tenant", "h:16"];
const H: usize = 2;
/// Returns a value from the third tenant's account, in MiB.
fn mib(view: &Value, key: &str) -> u64 {
    account(view, H, key) >> 20
}

fn serve(rig: &Rig, more: &[&str]) -> Program {
    let arguments = ["--quanta", "off", "--margin-mib", "0", NEVER_IDLE[0], NEVER_IDLE[1]];
    owner(rig, 128, &[&arguments[..], &SMALL, more].concat())
}

fn hoard(rig: &Rig, tenant: &str, arguments: &[&str]) -> Program {
    let mut command = rig.command(built("cuda-hoard"), "shim");
    command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, tenant);
    Program::start(command.args(arguments))
}

/// Returns the amount of memory that the program reports in its first line, in MiB.
fn taken(program: &mut Program) -> u64 {
    let line = program.line();
    line.parse().unwrap_or_else(|_| panic!("no number: {line:?}"))
}

/// Returns the third tenant's memory beyond its accounts according to NVML, in MiB.
fn past(view: &Value) -> u64 {
    let list = view["tenants"][H]["unaccounted"].as_array().expect("a list");
    list.iter().map(|one| one[1].as_u64().expect("a number")).sum::<u64>() >> 20
}

#[test]
fn chunks_with_kept_descriptors_count_until_card_frees_them() {
    let rig = Rig::new(512);
    let mut serving = serve(&rig, &[]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (link, _) = raw.hello("h", Through::Itself, Some(Manner::honest()));
    // Wait until the owner has polled the card.
    until_accounts(&mut serving, "it looks", |view| view["looks"].as_u64().is_some_and(|looks| looks > 1));
    let mut got = 0;
    let mut refused = None;
    for request in 1..=6 {
        raw.say(link, FromTenant::Allocate { request, card: 0, chunks: 8 }, 1);
        let mut ids = Vec::new();
        while ids.len() < 8 && refused.is_none() {
            let answer = raw.wait_for(link, |message| match message {
                FromOwner::Granted { chunks, .. } => Some(Ok(chunks)),
                FromOwner::Refused { reason, .. } => Some(Err(reason)),
                _ => None,
            });
            match answer {
                Ok(chunks) => ids.extend(chunks.into_iter().map(|chunk| chunk.id)),
                Err(reason) => refused = Some(reason),
            }
        }
        got += 2 * ids.len();
        if refused.is_some() {
            break;
        }
        raw.say(link, FromTenant::Free { chunks: ids }, 1);
    }
    // The owner measures the card's free memory before and after each release. The tenant can exceed its quota once
    // before a measurement, and again if a neighbour releases memory at the same time.
    assert!(got <= 3 * 16, "a tenant of 16 MiB got {got} MiB of the card");
    assert_eq!(refused, Some(Refusal::Quota));
    let view = until_accounts(&mut serving, "the tenant is charged", |view| {
        let chunks = account(view, H, "chunks_on_card") + account(view, H, "chunks_in_host");
        mib(view, "kept_bytes") >= 16 && chunks == 8
    });
    for tenant in [0, 1] {
        assert_eq!(account(&view, tenant, "kept_bytes"), 0, "the neighbour is not charged: {view}");
    }
    assert_has_share(&mut serving, &mut neighbour, 1000);
    let asks = || {
        raw.say(link, FromTenant::Allocate { request: 7, card: 0, chunks: 8 }, 1);
    };
    assert_keeps(&mut serving, &mut neighbour, || drop(rig.program("a", &["hold", "--mib", "4"]).end()), asks);
    drop(raw);
    until_accounts(&mut serving, "its memory is freed when the program exits", |view| mib(view, "kept_bytes") == 0);
    neighbour.end();
    super::support::describe(serving);
    rig.until_free();
}

#[test]
fn released_memory_counts_while_it_is_mapped() {
    let rig = Rig::new(512);
    let serving = serve(&rig, &[]);
    let mut program = hoard(&rig, "h", &["released"]);
    assert_eq!(taken(&mut program), 16, "MiB of a tenant of 16");
    program.kill();
    super::support::describe(serving);
    rig.until_free();
}

#[test]
fn shareable_pools_and_managed_memory_obey_quota() {
    let rig = Rig::new(512);
    let serving = serve(&rig, &[]);
    for what in ["pool", "managed"] {
        let mut program = hoard(&rig, "h", &[what]);
        assert_eq!(taken(&mut program), 16, "{what}");
        program.kill();
    }
    super::support::describe(serving);
}

#[test]
fn program_bypassing_library_is_charged_and_named() {
    let rig = Rig::new(512);
    let mut serving = serve(&rig, &[]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut program = hoard(&rig, "h", &["past", "--mib", "90"]);
    assert_eq!(taken(&mut program), 90, "the allocation cannot be refused");
    let view = until_accounts(&mut serving, "the excess is detected", |view| past(view) == 90);
    assert_eq!(view["tenants"][H]["unaccounted"][0][0], program.child.id(), "{view}");
    assert_eq!(mib(&view, "over_quota_bytes"), 90 - 16, "{view}");
    assert_eq!(account(&view, H, "chunks_on_card"), 8, "the tenant uses its quota: {view}");
    assert_has_share(&mut serving, &mut neighbour, 1000);
    // Further requests from the library are rejected.
    let mut second = hoard(&rig, "h", &["released"]);
    assert_eq!(taken(&mut second), 0);
    second.kill();
    assert_eq!(account(&accounts(&mut serving), 1, "kept_bytes"), 0);
    program.kill();
    until_accounts(&mut serving, "its memory is freed when the program exits", |view| {
        past(view) == 0 && account(view, H, "chunks_on_card") == 0
    });
    neighbour.end();
    super::support::describe(serving);
}

#[test]
fn program_bypassing_library_is_killed_when_configured() {
    let rig = Rig::new(512);
    let mut serving = serve(&rig, &["--kill-strangers"]);
    let mut honest = rig.program("h", &["hold", "--mib", "2"]);
    assert_eq!(honest.line(), "holds");
    let mut program = hoard(&rig, "h", &["past", "--mib", "90"]);
    assert_eq!(taken(&mut program), 90);
    let status = program.child.wait().expect("ends");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{status}");
    let view = until_accounts(&mut serving, "it counts", |view| account(view, H, "killed") == 1 && past(view) == 0);
    assert_eq!(view["tenants"][H]["killed"], 1, "{view}");
    assert_eq!(honest.end(), "held", "its innocent program continues");
    super::support::describe(serving);
}

#[test]
fn driver_overhead_of_program_is_charged() {
    let rig = Rig::new(512);
    let mut serving = serve(&rig, &[]);
    for (arguments, mib) in
        [(&["module", "--mib", "40"][..], 40), (&["limits", "--mib", "12"], 36), (&["contexts", "--count", "3"], 0)]
    {
        let mut program = hoard(&rig, "h", arguments);
        taken(&mut program);
        let view = until_accounts(&mut serving, "the excess is detected", |view| past(view) >= mib);
        assert_eq!(past(&view), mib, "{arguments:?}: {view}");
        program.kill();
        until_accounts(&mut serving, "its memory is freed when the program exits", |view| past(view) == 0);
    }
    super::support::describe(serving);
}

#[test]
fn contexts_beyond_the_first_are_charged() {
    let mut rig = Rig::new(512);
    rig.context_mib = 10;
    let mut serving = serve(&rig, &[]);
    let mut honest = rig.program("h", &["hold", "--mib", "6"]);
    assert_eq!(honest.line(), "holds");
    let mut program = hoard(&rig, "h", &["contexts", "--count", "3"]);
    taken(&mut program);
    let view = until_accounts(&mut serving, "the excesses are detected", |view| past(view) >= 30);
    assert_eq!(past(&view), 30, "the contexts of processes are not accounted, like that of the owner: {view}");
    program.kill();
    until_accounts(&mut serving, "their memory is freed when the program exits", |view| past(view) == 0);
    assert_eq!(honest.end(), "held");
    super::support::describe(serving);
}

#[test]
fn honest_programs_are_charged_nothing_past_their_accounts() {
    let mut rig = Rig::new(512);
    rig.context_mib = 6;
    let mut serving = serve(&rig, &[]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    for arguments in
        [&["train", "--mib", "20", "--rounds", "200"][..], &["churn"], &["own", "--mib", "40"], &["graphs"]]
    {
        rig.program("a", arguments).end();
    }
    assert_has_share(&mut serving, &mut neighbour, 1000);
    std::thread::sleep(Duration::from_secs(3));
    let view = accounts(&mut serving);
    for tenant in [0, 1] {
        assert_eq!(account(&view, tenant, "kept_bytes"), 0, "{view}");
        assert_eq!(view["tenants"][tenant]["unaccounted"].as_array().map(Vec::len), Some(0), "{view}");
    }
    assert_eq!(view["unexplained_bytes"], 0, "{view}");
    neighbour.end();
    super::support::describe(serving);
}
