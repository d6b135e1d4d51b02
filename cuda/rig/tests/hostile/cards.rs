//! Tests that programs cannot find other tenants' cards on a machine with several cards.

use serde_json::{Value, json};

use super::support::hostile::*;
use super::support::{Program, Rig, built, describe, owner};

/// Creates a machine with two cards. The second one has an owner.
fn second() -> (Rig, Program) {
    let mut rig = Rig::new(256);
    rig.cards = 2;
    let serving = owner(&rig, 64, &["--quanta", "off", "--device", "1", NEVER_IDLE[0], NEVER_IDLE[1]]);
    (rig, serving)
}

/// Returns the cards that a program finds. `seen` is the value of `CUDA_VISIBLE_DEVICES`.
fn cards(rig: &Rig, library: &str, seen: Option<&str>) -> Value {
    let mut command = rig.command(built("cuda-hoard"), library);
    if library == "shim" {
        command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "a");
    }
    if let Some(seen) = seen {
        command.env("CUDA_VISIBLE_DEVICES", seen);
    }
    let mut program = Program::start(command.arg("cards"));
    let line = program.line();
    program.kill();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

const SECOND: &str = "GPU-66616b65-2063-7564-6120-636172642031";

#[test]
fn tenant_of_second_card_sees_only_that_card_as_first() {
    let (rig, mut serving) = second();
    let plain = cards(&rig, "plain", None);
    assert_eq!(plain["devices"].as_array().map(Vec::len), Some(2), "{plain}");
    assert_eq!(plain["nvml_found"], json!([0, 0, 0, 0]), "{plain}");
    // The variable selects among the tenant's cards by index or by UUID. The program sees its value unchanged.
    for seen in [None, Some("0"), Some("0,1"), Some(SECOND)] {
        let found = cards(&rig, "shim", seen);
        assert_eq!(found["devices"], json!([["fake cuda card 1", "0000:02:00.0"]]), "{seen:?}: {found}");
        assert_eq!(found["beyond"], -101, "{found}");
        assert_eq!(found["by_address"], json!([-101, 0]), "{found}");
        assert_eq!(found["nvml"], json!([[SECOND, 0]]), "{found}");
        assert_eq!(found["nvml_found"], json!([6, 0, 6, 0]), "{found}");
        for call in ["alloc", "managed", "create"] {
            assert_eq!(found[call], 0, "{call}: {found}");
        }
        assert_eq!(found["create_on_another"], 101, "{found}");
        assert_eq!(found["variable"].as_str(), seen, "{found}");
    }
    for seen in ["1", "", "-1", "GPU-66616b65-2063-7564-6120-636172642030"] {
        assert_eq!(
            cards(&rig, "shim", Some(seen))["init"],
            100,
            "{seen:?}: the card belongs to another tenant, or does not exist"
        );
    }
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    assert_keeps(
        &mut serving,
        &mut neighbour,
        || drop(cards(&rig, "shim", None)),
        || drop(cards(&rig, "shim", Some("1"))),
    );
    neighbour.end();
    describe(serving);
}

#[test]
fn allocations_on_second_card_are_placed_and_counted_there() {
    let (rig, mut serving) = second();
    let mut program = rig.program("a", &["hold", "--mib", "20"]);
    assert_eq!(program.line(), "holds");
    let view = accounts(&mut serving);
    assert_eq!(account(&view, 0, "chunks_on_card"), 10, "{view}");
    let mut command = rig.command(built("cuda-hoard"), "shim");
    command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "a");
    let mut managed = Program::start(command.arg("managed"));
    assert_eq!(managed.line(), "44", "the remaining memory of the tenant of 64 MiB");
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    assert_has_share(&mut serving, &mut neighbour, 1000);
    neighbour.end();
    let looked = rig.free();
    assert!(looked.starts_with("free=256"), "the first card is unchanged: {looked}");
    managed.kill();
    assert_eq!(program.end(), "held");
    describe(serving);
}
