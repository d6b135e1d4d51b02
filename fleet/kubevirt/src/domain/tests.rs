use super::*;

/// A handwritten domain similar to the domains that virt-launcher writes (kubevirt/kubevirt,
/// pkg/virt-launcher/virtwrap/converter).
const KUBEVIRT: &str = include_str!("kubevirt.xml");

fn device() -> String {
    r#"{"driver":"vfio-user-pci","id":"vgpu0","socket":{"path":"/run/a & b","type":"unix"}}"#.to_owned()
}

fn text(document: &str, devices: &[String]) -> String {
    String::from_utf8(with_devices(document.as_bytes(), devices).unwrap()).unwrap()
}

#[test]
fn a_domain_of_kubevirt_gets_the_device_and_shared_memory() {
    let out = text(KUBEVIRT, &[device()]);
    assert!(out.contains(r#"xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0""#), "{out}");
    assert!(out.contains(r#"<memoryBacking><source type="memfd"/><access mode="shared"/></memoryBacking>"#), "{out}");
    let argument = r#"<qemu:arg value="-device"/><qemu:arg value="{&quot;driver&quot;:&quot;vfio-user-pci&quot;"#;
    assert!(out.contains(argument), "{out}");
    assert!(out.contains("/run/a &amp; b"), "{out}");
    // The rest of the document is unchanged.
    let added = ["<memoryBacking>", "<qemu:commandline>"];
    let mut rest = out.replace(r#" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0""#, "");
    for start in added {
        let end = start.replace('<', "</");
        let (from, to) = (rest.find(start).unwrap(), rest.find(&end).unwrap() + end.len());
        rest.replace_range(from..to, "");
    }
    assert_eq!(rest, KUBEVIRT);
}

#[test]
fn existing_domain_elements_are_kept_and_adjusted() {
    let before = r#"<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">
<memoryBacking><hugepages/><source type="anonymous"/><access mode="private"></access></memoryBacking>
<cpu><numa><cell id="0" cpus="0" memory="1" unit="GiB" memAccess="private"/><cell id="1"/></numa></cpu>
<qemu:commandline><qemu:arg value="-fw_cfg"/><qemu:arg value="name=opt/x"/></qemu:commandline></domain>"#;
    let out = text(before, &[device()]);
    assert!(
        out.contains(r#"<memoryBacking><hugepages/><source type="memfd"/><access mode="shared"/></memoryBacking>"#),
        "{out}"
    );
    assert!(out.contains(
        r#"<cell id="0" cpus="0" memory="1" unit="GiB" memAccess="shared"/><cell id="1" memAccess="shared"/>"#
    ));
    assert!(out.contains(r#"<qemu:arg value="name=opt/x"/><qemu:arg value="-device"/>"#), "{out}");
    assert_eq!(out.matches("<qemu:commandline>").count(), 1);
    assert_eq!(out.matches("xmlns:qemu").count(), 1);
    // A second call has no effect.
    assert_eq!(text(&out, &[device()]), out);
    // An empty list has no effect.
    assert_eq!(text(before, &[]), before);
}

#[test]
fn empty_elements_are_filled() {
    let out = text("<domain><memoryBacking/><qemu:commandline/></domain>", &[device()]);
    assert!(out.contains(r#"<memoryBacking><source type="memfd"/>"#) && out.contains("vfio-user-pci"), "{out}");
    let out = text("<domain/>", &[device()]);
    assert!(out.ends_with("</qemu:commandline></domain>") && out.contains("memfd"), "{out}");
}

#[test]
fn invalid_domain_is_rejected_with_cause() {
    let error = |document: &str| with_devices(document.as_bytes(), &[device()]).unwrap_err().to_string();
    assert!(error("<network/>").contains("the root is <network>"));
    assert!(error("").contains("end tag is missing"));
    assert!(error("<domain><a></domain>").contains("not XML"));
    assert!(error("<domain><a>").contains("end tag is missing"));
    assert!(error(r#"<domain xmlns:qemu="x"/>"#).contains("the prefix `qemu` stands for x"));
    let deep = format!("<domain>{}", "<a>".repeat(100));
    assert!(error(&deep).contains("deeper than"));
    assert!(with_devices(&vec![b' '; MAX_DOCUMENT + 1], &[device()]).unwrap_err().to_string().contains("at most"));
}
