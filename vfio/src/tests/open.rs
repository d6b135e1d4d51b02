//! Tests opening a card at an address, and every obstacle with its remedy.

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_GROUP_FLAGS_CONTAINER_SET, VFIO_GROUP_FLAGS_VIABLE,
};
use vfio_host::fake::Plan;

use super::fake::{GROUP, Machine, Nature};
use crate::kernel::Dependent;
use crate::{OpenError, Reset};
use card::Card;

fn told(error: OpenError) -> String {
    format!("{error} -> {}", error.what_to_do())
}

#[test]
fn card_is_awake_and_enabled_and_shows_its_identity() {
    let machine = Machine::new(Nature::default());
    let card = machine.card();
    let id = card.identity();
    assert_eq!((id.vendor, id.device, id.subsystem_vendor, id.subsystem), (0x10de, 0x06d8, 0x10de, 0x076f));
    assert_eq!((id.revision, id.class), (0xa3, 0x03_0000));
    assert_eq!((id.bar0_size, id.bar1_size, id.bar3_size), (16 << 20, 128 << 20, 64 << 20));
    assert_eq!(machine.enabled(), (true, true));
    drop(card);
    // The fake checks the mappings and the order in which files are closed.
    let again = machine.card();
    assert!(format!("{again:?}").contains("method: Units"), "{again:?}");
}

#[test]
fn each_open_obstacle_is_reported_with_a_fix() {
    let change = |change: fn(&mut Nature)| {
        let mut nature = Nature::default();
        change(&mut nature);
        nature
    };
    let cases = [
        (change(|n| n.open = Some(2)), "the kernel provides no /dev/vfio/7 -> load the modules: `modprobe vfio-pci`"),
        (change(|n| n.open = Some(13)), "this user may not open /dev/vfio/7 -> give the daemon's"),
        (
            change(|n| n.open = Some(16)),
            "another process uses IOMMU group 7, which contains 0000:65:00.0 -> stop that process: `fuser",
        ),
        (change(|n| n.open = Some(24)), "opening VFIO's files failed for 0000:65:00.0: Too many open files"),
        (change(|n| n.version = 1), "the kernel's VFIO has version 1, expected 0 -> load the module"),
        (change(|n| n.type1 = false), "the kernel's VFIO has no IOMMU of type 1, version 2 ->"),
        (change(|n| n.group_flags = 0), "the kernel does not permit IOMMU group 7: a device in it has a driver other"),
        (
            change(|n| n.group_flags = VFIO_GROUP_FLAGS_VIABLE | VFIO_GROUP_FLAGS_CONTAINER_SET),
            "another process uses IOMMU group 7",
        ),
        (change(|n| n.set_iommu = Some(1)), "the host's IOMMU does not remap interrupts, so a card could forge"),
        (change(|n| n.set_iommu = Some(5)), "VFIO_SET_IOMMU failed for 0000:65:00.0: Input/output error"),
        (
            change(|n| n.iommu.page_sizes = 1 << 16),
            "the kernel's VFIO does not support 4 KiB pages, only sizes 0x10000",
        ),
        (change(|n| n.flags = 0), "the kernel's VFIO reports that 0000:65:00.0 is not a PCI function"),
        (
            change(|n| n.sizes[0] = 8 << 20),
            "BAR0 of 0000:65:00.0 has 0x800000 bytes, unlike the BARs of any known card",
        ),
        (change(|n| n.sizes[2] = 0), "BAR3 of 0000:65:00.0 has 0x0 bytes"),
        (change(|n| n.insomnia = true), "waking it failed for 0000:65:00.0: it stays in power state D3"),
        (
            change(|n| n.boot0 = Some(u32::MAX)),
            "0000:65:00.0 does not respond: its registers read as all ones -> check",
        ),
        (
            change(|n| n.boot0 = Some(0x0e40_00a2)),
            "the identity register of 0000:65:00.0 reads 0x0e4000a2: this version does not support this chip ->",
        ),
        (
            change(|n| n.posted = false),
            "0000:65:00.0 has not been initialised by its VBIOS: register 0x02240c reads 0x0, without bit 1 -> let the \
             firmware run its VBIOS",
        ),
    ];
    for (nature, expected) in cases {
        let told = told(Machine::new(nature).open(Reset::Auto).unwrap_err());
        assert!(told.starts_with(expected), "{told}");
    }
}

#[test]
fn obstacles_of_the_host_come_before_vfio() {
    let machine = Machine::new(Nature { open: Some(2), ..Nature::default() });
    machine.sysfs.add(Plan {
        address: "0000:65:00.1",
        id: (0x10de, 0x0be5),
        class: 0x04_0300,
        driver: Some("snd_hda_intel"),
        group: Some(GROUP),
    });
    let told = told(machine.open(Reset::Auto).unwrap_err());
    assert!(
        told.starts_with("IOMMU group 7 of 0000:65:00.0 contains other devices that the host uses: 0000:65:00.1"),
        "{told}"
    );
    assert!(told.ends_with("-> `mediatorctl card bind 0000:65:00.1` as root"), "{told}");
}

#[test]
fn reset_method_follows_function_and_operator_choice() {
    let resettable = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
    let beside = |group| Dependent { group, address: "0000:66:00.0".parse().unwrap() };
    // Each case contains the flags, the kernel's reset methods, the other functions on the bus, the operator's choice,
    // and the expected method.
    let cases = [
        (VFIO_DEVICE_FLAGS_PCI, "\n", vec![], Reset::Auto, "units"),
        (resettable, "flr bus\n", vec![], Reset::Auto, "function"),
        // The kernel would reset the bus, which loses the VBIOS settings.
        (resettable, "bus\n", vec![beside(GROUP)], Reset::Auto, "units"),
        (resettable, "pm bus\n", vec![], Reset::Auto, "units"),
        (resettable, "flr\n", vec![], Reset::Units, "units"),
        (VFIO_DEVICE_FLAGS_PCI, "\n", vec![beside(GROUP)], Reset::Bus, "bus"),
    ];
    for (flags, ways, dependents, wanted, expected) in cases {
        let machine = Machine::new(Nature { flags, dependents, ..Nature::default() });
        machine.sysfs.spoil(Plan::CARD.address, "reset_method", ways);
        assert_eq!(machine.open(wanted).unwrap().reset_method(), expected, "{ways:?} {wanted:?}");
    }
    for (dependents, expected) in [
        (vec![], "the card's bus cannot be reset: No such device"),
        (
            vec![beside(GROUP), beside(9)],
            "the card's bus cannot be reset: 0000:66:00.0 in IOMMU group 9 would be reset",
        ),
    ] {
        let machine = Machine::new(Nature { dependents, ..Nature::default() });
        let told = told(machine.open(Reset::Bus).unwrap_err());
        assert!(told.starts_with(expected) && told.contains("choose `reset = \"auto\"`"), "{told}");
    }
}

#[test]
fn address_without_function_is_reported() {
    let machine = Machine::new(Nature::default());
    let told = told(machine.open_at("0000:66:00.0").unwrap_err());
    assert_eq!(
        told,
        "the host has no PCI function 0000:66:00.0 -> see `mediatorctl card list --host` for the host's cards"
    );
}

#[test]
fn card_is_opened_by_its_own_node_where_the_kernel_has_one() {
    let machine = Machine::new(Nature { node: true, ..Nature::default() });
    let card = machine.card();
    assert_eq!((card.identity().device, machine.enabled()), (0x06d8, (true, true)));
    drop(card);
    // Reopen the card, as the next daemon would do.
    drop(machine.card());
    let cases = [
        (1, "the host's IOMMU does not remap interrupts"),
        (16, "another process uses IOMMU group 7"),
        (22, "VFIO_DEVICE_BIND_IOMMUFD failed for 0000:65:00.0: Invalid argument"),
    ];
    for (errno, expected) in cases {
        let machine = Machine::new(Nature { node: true, bind: Some(errno), ..Nature::default() });
        let told = told(machine.open(Reset::Auto).unwrap_err());
        assert!(told.starts_with(expected), "{told}");
    }
}
