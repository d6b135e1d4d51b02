//! Tests commands on the host's own cards, with a fake sysfs and without a daemon.

use super::*;
use vfio_host::fake::{Fake, Plan};

fn ran(fake: &tempfile::TempDir, arguments: &[&str]) -> Ran {
    let place = fake.path().display().to_string();
    ctl_at("/nonexistent/admin.sock", &[arguments, &["--sysfs", &place]].concat())
}

#[test]
fn card_list_of_host_names_obstacle_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let list = ["card", "list", "--host"];
    assert_eq!(ran(&folder, &list).out, "no NVIDIA cards\n");
    let fake = Fake::new(folder.path());
    fake.add(Plan::CARD);
    fake.add(Plan { address: "0000:66:00.0", group: Some(8), driver: Some("vfio-pci"), ..Plan::CARD });
    let listed = ran(&folder, &list);
    assert_eq!((listed.code, &*listed.err), (Code::Good, ""));
    let lines: Vec<_> = listed.out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(
        lines,
        [
            "ADDRESS PCI ID DRIVER GROUP IN THE GROUP RESET USABLE",
            "0000:65:00.0 10de:06d8 nouveau 7 - bus no",
            "0000:66:00.0 10de:06d8 vfio-pci 8 - bus yes",
            "",
            "0000:65:00.0 is bound to driver nouveau, not vfio-pci",
            "`mediatorctl card bind 0000:65:00.0` as root",
        ]
    );
    let listed: serde_json::Value =
        serde_json::from_str(&ran(&folder, &["--json", "card", "list", "--host"]).out).unwrap();
    assert_eq!(
        (&listed["cards"][0]["address"], &listed["cards"][0]["usable"]),
        (&"0000:65:00.0".into(), &false.into())
    );
    assert_eq!(listed["cards"][0]["obstacles"][0]["what_to_do"], "`mediatorctl card bind 0000:65:00.0` as root");
}

#[test]
fn binding_ends_with_the_code_of_its_trouble() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new(folder.path());
    fake.add(Plan { driver: Some("vfio-pci"), ..Plan::CARD });
    fake.add(Plan { address: "0000:01:00.0", group: None, ..Plan::CARD });
    fake.add(Plan { address: "0000:02:00.0", id: (0x8086, 1), ..Plan::CARD });
    let cases: [(&[&str], Code, &str); 7] = [
        (&["card", "bind", "0000:65:00.0"], Code::Good, ""),
        (&["card", "bind", "65:00.0"], Code::Usage, "is not a PCI function address, expected one such as 0000:65:00.0"),
        (&["card", "bind", "0000:7f:00.0"], Code::NotFound, "the host has no PCI function 0000:7f:00.0"),
        (&["card", "bind", "0000:01:00.0"], Code::Conflict, "enable the IOMMU in the firmware setup"),
        (&["card", "unbind", "0000:02:00.0"], Code::Usage, "only NVIDIA's are supported"),
        (
            &["card", "unbind", "0000:65:00.0", "--driver", "nvidia"],
            Code::Conflict,
            "load its module: `modprobe nvidia`",
        ),
        // The files of this fake sysfs are plain files, so writes have no effect.
        (
            &["card", "unbind", "0000:65:00.0", "--driver", "nouveau"],
            Code::Failed,
            "the kernel bound 0000:65:00.0 to vfio-pci",
        ),
    ];
    for (arguments, code, what) in cases {
        let ran = ran(&folder, arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(what), "{arguments:?}: {}", ran.err);
    }
    assert_eq!(ran(&folder, &["card", "bind", "0000:65:00.0"]).out, "0000:65:00.0 is already bound to vfio-pci\n");
}
