//! Tests a card that is a PCI function. `mediatorctl` lists and binds it, and the daemon drives and releases it.

use anyhow::Result;
use tests::files::Files;
use tests::guest::{self, TRAPPED, vm_toml};
use tests::nest::{self, ADDRESS, Nest, OUTER_VM, Shape};

/// VRAM size of the card in MiB.
const CARD_MIB: u32 = 256;
/// VRAM size of the card in MiB, as configured for the inner daemon.
const VRAM_MIB: u32 = 128;
const SHAPE: Shape<'static> = Shape { card_mib: CARD_MIB, card_keys: "", memory_mib: 1024, vms: &[], huge_mib: 0 };
/// VRAM size of a VM in MiB.
const VM_MIB: u32 = 32;
/// Number of copy rounds made by the test's own client.
const ROUNDS: u64 = 1;
/// Number of bytes verified per round: 64 pages in VRAM and 64 pages in RAM.
const ROUND_BYTES: u64 = 2 * 64 * 4096;

/// Lists the host's cards, as an operator would, and returns the only card.
fn listed(nest: &Nest) -> Result<serde_json::Value> {
    let mut list = nest.ctl_json("card list --host")?;
    assert_eq!(list["cards"].as_array().map(Vec::len), Some(1), "{list}");
    Ok(list["cards"][0].take())
}

#[test]
fn host_card_is_bound_driven_and_given_back() -> Result<()> {
    let mut files = Files::default();
    let vms = vm_toml("a", VM_MIB) + TRAPPED;
    files.write("etc/mediatord.toml", 0o644, nest::config(VRAM_MIB, &vms).as_bytes());
    files.write("etc/other.toml", 0o644, nest::config(VRAM_MIB, &vms).replace("/run", "/tmp").as_bytes());
    let nest = Nest::boot("nested", SHAPE, files)?;

    let card = listed(&nest)?;
    assert_eq!((&card["address"], &card["driver"]), (&ADDRESS.into(), &serde_json::Value::Null), "{card}");
    assert!(card["group"].is_u64() && card["usable"] == false, "{card}");
    let said = nest.ok("mediatorctl card list --host")?;
    assert!(said.contains(&format!("mediatorctl card bind {ADDRESS}")), "{said}");
    // Check that a daemon reports the same obstacle.
    let refused = nest.run("mediatord --config /etc/mediatord.toml")?;
    assert!(refused.code != 0 && refused.text().contains(&format!("mediatorctl card bind {ADDRESS}")), "{refused:?}");
    assert!(nest.ok(&format!("mediatorctl card bind {ADDRESS}"))?.contains("is now bound to vfio-pci"));
    let card = listed(&nest)?;
    assert_eq!((&card["driver"], &card["usable"]), (&"vfio-pci".into(), &true.into()), "{card}");

    // Check that the operator must approve firmware for the card's falcons.
    let refused = nest.run("mediatord --config /etc/mediatord.toml")?;
    let told = refused.text().contains("no firmware is approved for fecs, gpccs, ce0, ce1; approve some");
    assert!(refused.code != 0 && told, "{refused:?}");
    nest.approve_firmware()?;
    let daemon = nest.start_daemon("/etc/mediatord.toml")?;
    let refused = nest.run("mediatord --config /etc/other.toml")?;
    assert!(refused.code != 0, "{refused:?}");
    let copied = nest.ok(&format!("copies /run/a.sock {VM_MIB} {ROUNDS}"))?;
    assert!(copied.contains(&format!("{} bytes verified", ROUNDS * ROUND_BYTES)), "{copied}");
    let log = nest.stop_daemon(daemon)?;
    println!("{log}");
    assert!(log.contains("reset=\"units\"") && !log.contains("panicked"), "{log}");

    let shown = guest::show(nest.outer(), OUTER_VM)?;
    println!("the outer daemon's view: {shown}");
    assert!(guest::messages(nest.outer(), OUTER_VM)? > 0, "{shown}");
    println!(
        "REPORT {}; card vfio {ADDRESS}: {} bytes verified, {} messages to the outer daemon",
        nest.platform(),
        ROUNDS * ROUND_BYTES,
        guest::messages(nest.outer(), OUTER_VM)?
    );
    nest.ok(&format!("mediatorctl card unbind {ADDRESS}"))?;
    assert_eq!(listed(&nest)?["driver"], serde_json::Value::Null);
    Ok(())
}
