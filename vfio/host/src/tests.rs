//! Tests listing and binding functions, on a fake sysfs.

use std::io;
use std::path::Path;

use crate::bind::{Attributes, BindError};
use crate::fake::{Fake, Plan};
use crate::{Address, Function, ManagerError, Sysfs};

const AUDIO: Plan<'static> = Plan {
    address: "0000:65:00.1",
    id: (0x10de, 0x0be5),
    class: 0x04_0300,
    driver: Some("snd_hda_intel"),
    group: Some(7),
};
const BRIDGE: Plan<'static> =
    Plan { address: "0000:64:00.0", id: (0x8086, 0x1901), class: 0x06_0400, driver: Some("pcieport"), group: Some(7) };

fn card() -> Address {
    Plan::CARD.address.parse().unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Returns each obstacle with its remedy.
fn told(function: &Function) -> Vec<String> {
    function.obstacles().iter().map(|obstacle| format!("{obstacle} -> {}", obstacle.what_to_do())).collect()
}

#[test]
fn host_without_pci_has_no_cards() {
    assert_eq!(Sysfs::at("/nonexistent").list().unwrap(), []);
}

#[test]
fn only_display_controllers_of_nvidia_are_listed() {
    let folder = folder();
    let fake = Fake::new(folder.path());
    fake.add(AUDIO);
    fake.add(Plan { address: "0000:00:02.0", id: (0x8086, 1), group: Some(1), ..Plan::CARD });
    fake.add(Plan { address: "0000:b3:00.0", class: 0x03_0200, group: Some(9), driver: None, ..Plan::CARD });
    fake.add(Plan::CARD);
    let list = fake.sysfs().list().unwrap();
    let addresses: Vec<_> = list.iter().map(|function| function.address.to_string()).collect();
    assert_eq!(addresses, ["0000:65:00.0", "0000:b3:00.0"]);
    assert_eq!((list[0].vendor, list[0].device, list[0].class), (0x10de, 0x06d8, 0x03_0000));
    assert_eq!(
        (list[0].group, list[0].driver.as_deref(), &*list[0].resets),
        (Some(7), Some("nouveau"), &["bus".into()][..])
    );
    assert_eq!(list[1].driver, None);
}

#[test]
fn each_obstacle_is_reported_with_a_fix() {
    let folder = folder();
    let fake = Fake::new(folder.path());
    fake.add(Plan { driver: Some("vfio-pci"), ..Plan::CARD });
    fake.add(BRIDGE);
    let look = || told(&fake.sysfs().function(card()).unwrap());
    assert_eq!(look(), [""; 0], "a bridge in the group is not an obstacle");
    fake.add(AUDIO);
    assert_eq!(
        look(),
        [
            "IOMMU group 7 of 0000:65:00.0 contains other devices that the host uses: 0000:65:00.1 (driver snd_hda_intel) -> \
          `mediatorctl card bind 0000:65:00.1` as root"
        ]
    );
    fake.add(Plan { address: "0000:66:00.0", id: (0x8086, 0x10d3), class: 0x02_0000, driver: Some("e1000e"), ..AUDIO });
    assert!(look()[0].ends_with("-> move the card to a slot that has its own IOMMU group"), "{:?}", look());

    let others = [
        (
            Plan { address: "0000:01:00.0", group: None, ..Plan::CARD },
            "0000:01:00.0 is in no IOMMU group: the host has no IOMMU, or does not use it -> enable the IOMMU",
        ),
        (
            Plan { address: "0000:02:00.0", group: Some(1), ..Plan::CARD },
            "0000:02:00.0 is bound to driver nouveau, not vfio-pci -> `mediatorctl card bind 0000:02:00.0` as root",
        ),
        (
            Plan { address: "0000:03:00.0", group: Some(2), driver: None, ..Plan::CARD },
            "0000:03:00.0 is bound to no driver, expected vfio-pci -> `mediatorctl card bind 0000:03:00.0` as root",
        ),
        (
            Plan { address: "0000:04:00.0", id: (0x1af4, 0x1050), ..Plan::CARD },
            "0000:04:00.0 is 1af4:1050 of class 030000, not an NVIDIA display controller -> see `mediatorctl card list",
        ),
    ];
    for (plan, expected) in others {
        fake.add(plan);
        let told = told(&fake.sysfs().function(plan.address.parse().unwrap()).unwrap());
        assert!(told[0].starts_with(expected), "{told:?}");
    }
}

#[test]
fn malformed_sysfs_value_is_reported() {
    let folder = folder();
    let fake = Fake::new(folder.path());
    let sysfs = fake.sysfs();
    assert!(matches!(sysfs.function(card()), Err(ManagerError::NoFunction(_))));
    fake.add(Plan::CARD);
    for text in ["", "10de\n", "0x\n", "0xfffffffff\n", "0xg\n"] {
        fake.spoil(Plan::CARD.address, "vendor", text);
        let error = sysfs.function(card()).unwrap_err().to_string();
        assert!(error.contains("vendor is") && error.contains("not a number"), "{error}");
    }
}

#[test]
fn card_goes_to_vfio_pci_and_back() {
    let folder = folder();
    let fake = Fake::new(folder.path());
    fake.add(Plan::CARD);
    let sysfs = fake.sysfs();
    let change = sysfs.bind(&fake, card()).unwrap();
    assert_eq!((change.before.as_deref(), change.now.as_deref()), (Some("nouveau"), Some("vfio-pci")));
    assert_eq!(sysfs.function(card()).unwrap().obstacles(), []);
    // A second call must have no effect.
    assert_eq!(sysfs.bind(&fake, card()).unwrap().before.as_deref(), Some("vfio-pci"));
    let change = sysfs.unbind(&fake, card(), None).unwrap();
    assert_eq!((change.before.as_deref(), change.now.as_deref()), (Some("vfio-pci"), Some("nouveau")));
    // The function must be bound to the given driver, or remain unbound if the kernel has no driver for it.
    fake.add_driver("nvidia");
    sysfs.bind(&fake, card()).unwrap();
    assert_eq!(sysfs.unbind(&fake, card(), Some("nvidia")).unwrap().now.as_deref(), Some("nvidia"));
    fake.remove_driver("nouveau");
    assert_eq!(sysfs.unbind(&fake, card(), None).unwrap().now, None);
    // The audio function must also be bound, because it is in the same group.
    fake.add(AUDIO);
    assert_eq!(sysfs.bind(&fake, AUDIO.address.parse().unwrap()).unwrap().now.as_deref(), Some("vfio-pci"));
}

/// Simulates files that cannot be written and files to which writes have no effect.
struct Stubborn(Option<i32>);

impl Attributes for Stubborn {
    fn write(&self, _: &Path, _: &str) -> io::Result<()> {
        self.0.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

#[test]
fn bind_error_says_how_to_fix_it() {
    let folder = folder();
    let fake = Fake::new(folder.path());
    fake.add(Plan::CARD);
    fake.add(Plan { address: "0000:01:00.0", group: None, ..Plan::CARD });
    fake.add(Plan { address: "0000:02:00.0", id: (0x8086, 0x10d3), ..Plan::CARD });
    let sysfs = fake.sysfs();
    let told = |error: BindError| format!("{error} -> {}", error.what_to_do());
    let bind = |address: &str, files: &dyn Attributes| told(sysfs.bind(files, address.parse().unwrap()).unwrap_err());
    assert!(bind("0000:7f:00.0", &fake).starts_with("the host has no PCI function 0000:7f:00.0 -> see"));
    assert!(bind("0000:01:00.0", &fake).contains("no IOMMU group"));
    assert!(bind("0000:02:00.0", &fake).starts_with("0000:02:00.0 is a function of vendor 8086; only NVIDIA's"));
    assert!(bind(Plan::CARD.address, &Stubborn(Some(13))).ends_with("-> run this as root"));
    let text = bind(Plan::CARD.address, &Stubborn(None));
    assert!(
        text.starts_with("the kernel bound 0000:65:00.0 to nouveau, expected vfio-pci; see the kernel log"),
        "{text}"
    );
    fake.remove_driver("vfio-pci");
    assert_eq!(
        bind(Plan::CARD.address, &fake),
        "the kernel has no driver named vfio-pci -> load its module: `modprobe vfio-pci`"
    );
    assert_eq!(sysfs.function(card()).unwrap().driver.as_deref(), Some("nouveau"), "nothing has changed");
    for name in ["", "../../../etc", "a b", &"x".repeat(64)] {
        let error = sysfs.unbind(&fake, card(), Some(name)).unwrap_err();
        assert!(matches!(error, BindError::NoName(_)), "{name}: {error}");
    }
}

#[test]
fn node_of_function_is_listed_if_kernel_creates_one() {
    for (name, expected) in [("vfio3", Some("vfio3")), ("vfio", None), ("vfio3x", None), ("hwmon1", None)] {
        let folder = folder();
        let fake = Fake::new(folder.path());
        fake.add(Plan { driver: Some("vfio-pci"), ..Plan::CARD });
        assert_eq!(fake.sysfs().function(card()).unwrap().node, None);
        fake.add_node(Plan::CARD.address, name);
        assert_eq!(fake.sysfs().function(card()).unwrap().node.as_deref(), expected);
    }
}
