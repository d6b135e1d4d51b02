//! Checks virtual machines that are Xen domains.

use crate::refusal::{Refusal, RefusalKind};
use crate::{CardKind, CardSpec, SocketMode, VmSpec};

/// Maximum length of a domain's name, in bytes.
const MAX_NAME: usize = 255;
/// First reserved domain ID. Source: Xen's `public/xen.h`, `DOMID_FIRST_RESERVED`.
const RESERVED: u16 = 0x7ff0;

/// Returns all reasons to reject a virtual machine's domain, given the other virtual machines `others`.
pub(crate) fn vm(vm: &VmSpec, cards: &[CardSpec], others: &[&VmSpec]) -> Vec<Refusal> {
    let Some(domain) = &vm.xen_domain else { return Vec::new() };
    let mut refusals = Vec::new();
    let mut say = |kind, field, what: String| refusals.push(Refusal { kind, field, what });
    if !is_domain(domain) {
        let what = format!("`{domain}` is not a domain, expected a name or an ID from 1 to {}", RESERVED - 1);
        say(RefusalKind::Invalid, "xen_domain", what);
    }
    let user = others.iter().find(|other| other.name != vm.name && other.xen_domain.as_ref() == Some(domain));
    if let Some(other) = user {
        let what = format!("`{domain}` is the domain of VM `{}`, expected another one", other.name);
        say(RefusalKind::Conflict, "xen_domain", what);
    }
    if cards.iter().any(|card| card.name == vm.card && card.kind == CardKind::Vfio) {
        let what = format!(
            "card `{}` is of kind = \"vfio\", expected one of kind = \"simgpu\": Xen does not support VFIO, and no \
             interface maps a domain's memory for a card of domain 0 (see docs/guides/xen.md)",
            vm.card
        );
        say(RefusalKind::Invalid, "xen_domain", what);
    }
    let of_socket = [
        ("socket", vm.socket.is_some()),
        ("mode", vm.mode != SocketMode::default()),
        ("owner", vm.owner.is_some()),
        ("group", vm.group.is_some()),
    ];
    for (field, _) in of_socket.into_iter().filter(|(_, said)| *said) {
        say(
            RefusalKind::Invalid,
            field,
            "expected no such key with `xen_domain`, because the VM has no socket".to_owned(),
        );
    }
    refusals
}

fn is_domain(text: &str) -> bool {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().is_ok_and(|id: u16| (1..RESERVED).contains(&id));
    }
    text.len() <= MAX_NAME && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(domain: &str) -> VmSpec {
        VmSpec { xen_domain: Some(domain.to_owned()), ..VmSpec::new("a", "card0", 64) }
    }

    fn refused(spec: &VmSpec, others: &[&VmSpec]) -> Vec<&'static str> {
        vm(spec, &[], others).iter().map(|refusal| refusal.field).collect()
    }

    #[test]
    fn domain_is_a_name_or_a_number() {
        for good in ["guest", "guest-1.example", "1", "32751"] {
            assert!(refused(&spec(good), &[]).is_empty(), "{good}");
        }
        for bad in ["", "0", "32752", "99999999", "a/b", "a b", &"x".repeat(256)] {
            assert_eq!(refused(&spec(bad), &[]), ["xen_domain"], "{bad}");
        }
    }

    #[test]
    fn domain_belongs_to_one_vm() {
        let other = VmSpec { name: "b".to_owned(), ..spec("guest") };
        assert_eq!(refused(&spec("guest"), &[&other]), ["xen_domain"]);
        assert!(refused(&spec("guest"), &[&spec("guest")]).is_empty(), "a VM does not conflict with its earlier self");
    }

    #[test]
    fn xen_domain_on_vfio_card_is_rejected_with_reason() {
        let card = |kind: &str| -> CardSpec {
            let address = if kind == "vfio" { "address = \"0000:65:00.0\"\n" } else { "" };
            toml::from_str(&format!("name = \"card0\"\nkind = {kind:?}\nvram_mib = 256\n{address}")).unwrap()
        };
        let said = vm(&spec("guest"), &[card("vfio")], &[]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].field == "xen_domain" && said[0].what.contains("docs/guides/xen.md"), "{said:?}");
        assert!(vm(&spec("guest"), &[card("simgpu")], &[]).is_empty());
    }

    #[test]
    fn keys_of_a_socket_are_refused_with_a_domain() {
        let mut spec = spec("guest");
        spec.socket = Some("/run/a.sock".into());
        spec.group = Some("kvm".to_owned());
        assert_eq!(refused(&spec, &[]), ["socket", "group"]);
    }
}
