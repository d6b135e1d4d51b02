//! Tests of reporting, limits and accounting of RAM lent by VMs.

use super::*;
use crate::fixture::{guest, one_card};
use rig::Machine;
use rig::RemoteGuest;
use rig::driver::{At, Driver, M2MF, m2mf_copy, object, pattern};
use serde_json::json;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
const CARD: &str = "/v1/cards/card0/memory";
const VM: &str = "/v1/vms/a/memory";
/// GPU virtual address at which the guest maps its RAM.
const RAM: u64 = 0x300_0000;

fn served() -> Served {
    let served = one_card("memory.ram = { quota_mib = 8, guarantee_mib = 2 }\n");
    for name in ["a", "b"] {
        let _: api::Vm =
            served.client().post("/v1/vms", &json!({ "name": name, "card": "card0", "vram_mib": 32 })).unwrap();
    }
    served
}

fn ram_of_a(served: &Served) -> api::Ram {
    served.client().get::<api::Vm>("/v1/vms/a").unwrap().ram
}

fn set(served: &Served, path: &str, ram: serde_json::Value) -> Result<serde_json::Value, String> {
    served.client().patch(path, &json!({ "ram": ram })).map_err(|error| error.to_string())
}

#[test]
fn a_quota_of_ram_holds_from_now_on() {
    let served = served();
    let (mut driver, _channel) = guest(&served, "a");
    assert!(driver.guest.map_ram(0, 4 * MIB, true));
    let expected =
        api::Ram { lent_bytes: 4 * MIB, quota_bytes: 8 * MIB, guarantee_bytes: 2 * MIB, ..api::Ram::default() };
    assert_eq!(ram_of_a(&served), expected);
    assert!(!driver.guest.map_ram(16 * MIB, 6 * MIB, true), "above the default quota of the card");
    set(&served, VM, json!({ "quota_mib": 2 })).unwrap();
    assert!(!driver.guest.map_ram(16 * MIB, 2 * MIB, true), "above the VM's own quota, although lent RAM stays lent");
    set(&served, CARD, json!({ "quota_mib": 64 })).unwrap();
    assert!(!driver.guest.map_ram(16 * MIB, 2 * MIB, true), "the VM's own quota overrides that of the card");
    set(&served, VM, json!({ "quota_mib": null })).unwrap();
    assert!(driver.guest.map_ram(16 * MIB, 60 * MIB, true));
    assert!(!driver.guest.map_ram(128 * MIB, 2 * MIB, true));
    let ram = ram_of_a(&served);
    assert_eq!((ram.lent_bytes, ram.quota_bytes), (64 * MIB, 64 * MIB));
}

#[test]
fn impossible_ram_guarantee_is_rejected_and_shares_stay() {
    let served = served();
    let all = 896 << 10;
    let error = set(&served, VM, json!({ "quota_mib": all, "guarantee_mib": all })).unwrap_err();
    assert!(error.contains(&format!("memory.ram.guarantee_mib: {all} MiB, expected at most {}", all - 2)), "{error}");
    let error = set(&served, CARD, json!({ "quota_mib": all, "guarantee_mib": all / 2 + 2 })).unwrap_err();
    assert!(error.contains("VM `b`") && error.contains("memory.ram.guarantee_mib"), "{error}");
    let ram = ram_of_a(&served);
    assert_eq!((ram.quota_bytes, ram.guarantee_bytes), (8 * MIB, 2 * MIB));
    let host = served.fixture.daemon.host_of("card0").unwrap();
    let of_both = || [0, 1].map(|vm| host.lock().memory().iova().share_and_charged(vram::TenantId(vm)).0);
    let before = of_both();
    // According to the configuration, enough addresses are free, but another allocation leaves no contiguous range.
    let held = host.lock().memory_mut().iova_mut().allocate(700 << 30, 0).unwrap();
    let error = set(&served, CARD, json!({ "quota_mib": all, "guarantee_mib": all / 4 })).unwrap_err();
    assert!(error.contains("in use"), "{error}");
    assert_eq!(of_both(), before, "all VMs of the card keep their settings");
    host.lock().memory_mut().iova_mut().free(held);
    set(&served, CARD, json!({ "quota_mib": all, "guarantee_mib": all / 4 })).unwrap();
    assert_eq!(of_both().map(|share| share.guarantee), [224 << 30; 2]);
}

#[test]
fn memory_that_the_card_touches_first_is_counted_and_bounded() {
    let served = served();
    let mut guest = RemoteGuest::connect(&served.fixture.path("a.sock"), 32 * MIB).unwrap();
    assert!(guest.map_ram(0, 4 * MIB, true));
    // The driver has not enabled bus mastering yet. Memory that was never touched counts as private to the VMM.
    guest.ram_write(0, &pattern(3, 0));
    let mut driver = Driver::new(guest);
    let mut channel = driver.channel(1);
    driver.map(channel.space, RAM, At::Ram(0), 8);
    let copy = |to: u64| [object(M2MF), m2mf_copy(RAM, RAM + to * PAGE, PAGE as u32)].concat();
    driver.submit(&mut channel, &copy(1));
    driver.wait(&channel);
    assert!(driver.ram_holds(PAGE, 1, 3));
    driver.submit(&mut channel, &copy(1));
    driver.wait(&channel);
    assert_eq!(ram_of_a(&served).touched_bytes, PAGE, "one page, counted once");
    set(&served, VM, json!({ "touch_mib": 0 })).unwrap();
    driver.submit(&mut channel, &copy(1));
    driver.wait(&channel);
    driver.submit(&mut channel, &copy(2));
    driver.wait(&channel);
    assert!(!driver.ram_holds(2 * PAGE, 1, 3), "like an access to missing RAM");
    let ram = ram_of_a(&served);
    assert_eq!((ram.touched_bytes, ram.touch_limit_bytes), (PAGE, Some(0)));
    assert!(ram.touches_refused > 0);
    let text = served.client().request(Method::GET, "/metrics", Default::default()).unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    assert!(text.contains("gpu_mediator_vm_ram_touched_bytes{vm=\"a\",card=\"card0\"} 4096"), "{text}");
    assert!(text.contains("gpu_mediator_vm_ram_bytes{vm=\"a\",card=\"card0\",of=\"lent\"} 4194304"), "{text}");
}

/// The configuration's defaults and limits must match those of the card manager, which does not exist while the card is
/// closed.
#[test]
fn the_configuration_and_the_owner_agree_on_bus_addresses() {
    let spoken = config::RamSpec::default().on(&config::CardMemory::default());
    assert_eq!(crate::memory::ram_share(&spoken), card_manager::iova::RamShare::default());
    let of = |mib: u64| config::RamSpec { quota_mib: Some(mib), ..config::RamSpec::default() };
    let all = card_manager::iova::SHARED_BYTES / MIB;
    assert_eq!(of(all).check(), []);
    assert_eq!(of(all + 2).check().len(), 1);
}
