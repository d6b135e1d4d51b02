use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use mediatord::fixture::one_card;
use serde_json::Value;
use tempfile::TempDir;
use vfio_host::fake::{Fake, Plan};

use crate::{Code, run};

/// Creates a host that meets all requirements of a software card.
fn host() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in [
        ("proc/cpuinfo", "processor : 0\nflags : fpu svm\n"),
        ("proc/sys/fs/aio-nr", "12\n"),
        ("proc/sys/fs/aio-max-nr", "65536\n"),
        ("dev/kvm", ""),
        ("etc/passwd", "root:x:0:0::/root:/bin/sh\nlibvirt-qemu:x:64055:104::/:/bin/false\n"),
        ("etc/group", "root:x:0:\nkvm:x:104:\n"),
        ("etc/os-release", "VERSION_CODENAME=trixie\n"),
        ("etc/gpu-mediator.toml", "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n"),
        ("run/systemd/system/x", ""),
    ] {
        write(&root, path, text);
    }
    qemu(&root, "11.1.3", "name \"vfio-user-pci\", bus PCI");
    program(
        &root,
        "usr/bin/systemctl",
        "printf 'LoadState=loaded\\nActiveState=active\\nUnitFileState=enabled\\nNRestarts=0\\n'",
    );
    root
}

fn write(root: &TempDir, path: &str, text: &str) {
    let path = root.path().join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn program(root: &TempDir, path: &str, script: &str) {
    write(root, path, &format!("#!/bin/sh\n{script}\n"));
    fs::set_permissions(root.path().join(path), fs::Permissions::from_mode(0o755)).unwrap();
}

fn qemu(root: &TempDir, version: &str, devices: &str) {
    let script =
        format!("case $1 in --version) echo 'QEMU emulator version {version} (x)';; *) echo '{devices}';; esac");
    program(root, "usr/bin/qemu-system-x86_64", &script);
}

fn looked(root: &TempDir, socket: &str) -> (Code, Vec<Value>, String) {
    let ran = |more: &[&str]| {
        let root = root.path().display().to_string();
        let all = [&["mediatorctl", "--socket", socket, "doctor", "--root", &root], more].concat();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = run(all, &mut out, &mut err);
        assert_eq!(String::from_utf8(err).unwrap(), "");
        (code, String::from_utf8(out).unwrap())
    };
    let (code, text) = ran(&[]);
    let (again, json) = ran(&["--json"]);
    assert_eq!(code, again);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["good"], code == Code::Good);
    (code, json["findings"].as_array().unwrap().clone(), text)
}

/// Returns the findings of a check, except for good ones.
fn told(findings: &[Value], check: &str) -> String {
    let of = findings.iter().filter(|one| one["check"] == check && one["state"] != "good");
    of.map(|one| {
        format!(
            "{}: {} [{}]\n",
            one["state"].as_str().unwrap(),
            one["found"].as_str().unwrap(),
            one["what_to_do"].as_str().unwrap()
        )
    })
    .collect()
}

#[test]
fn a_good_host_lacks_nothing() {
    let served = one_card("");
    let socket = served.fixture.path("admin.sock").display().to_string();
    let (code, findings, text) = looked(&host(), &socket);
    assert_eq!(code, Code::Good, "{text}");
    assert!(findings.iter().all(|one| one["state"] == "good"), "{text}");
    for line in [
        "ok  config",
        "ok  kvm",
        "QEMU 11.1, with vfio-user-pci",
        "responds: 1 cards, 0 VMs",
        "nothing is missing; 0 to note",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn doctor_reports_each_missing_item_with_remedy() {
    type Break = fn(&TempDir);
    let cases: [(&str, Break, &str); 12] = [
        (
            "kvm",
            |root| fs::remove_file(root.path().join("dev/kvm")).unwrap(),
            "missing: /dev/kvm is missing [run `modprobe kvm",
        ),
        (
            "kvm",
            |root| write(root, "proc/cpuinfo", "flags : fpu\n"),
            "missing: /dev/kvm exists, but the CPU does not offer",
        ),
        ("aio", |root| write(root, "proc/sys/fs/aio-nr", "65500\n"), "missing: 65500 of 65536 asynchronous"),
        (
            "aio",
            |root| fs::remove_file(root.path().join("proc/sys/fs/aio-nr")).unwrap(),
            "boot a kernel with CONFIG_AIO",
        ),
        ("qemu", |root| qemu(root, "10.0.13", ""), "missing: qemu-system-x86_64 is QEMU 10.0, older than 10.1"),
        ("qemu", |root| qemu(root, "10.1.0", "none"), "missing: qemu-system-x86_64 is QEMU 10.1, without the device"),
        ("qemu", |root| program(root, "usr/bin/qemu-system-x86_64", "exit 1"), "reports no version"),
        ("config", |root| write(root, "etc/gpu-mediator.toml", "[[card]]\nname = 3\n"), "etc/gpu-mediator.toml:2:8: "),
        (
            "config",
            |root| fs::remove_file(root.path().join("etc/gpu-mediator.toml")).unwrap(),
            "cannot be read: No such file",
        ),
        ("config", |root| write(root, "etc/gpu-mediator.toml", ""), "has no [[card]] table"),
        (
            "service",
            |root| {
                program(
                    root,
                    "usr/bin/systemctl",
                    "printf 'LoadState=loaded\\nActiveState=failed\\nSubState=failed\\n'",
                )
            },
            "missing: gpu-mediator.service is failed (failed) [run `systemctl start",
        ),
        (
            "sockets",
            |root| {
                let text = "[daemon]\nsocket_dir = \"/srv/gpus\"\n[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n";
                write(root, "etc/gpu-mediator.toml", text);
            },
            "missing: the folder /srv/gpus does not exist",
        ),
    ];
    for (check, breaks, expected) in cases {
        let root = host();
        breaks(&root);
        // The daemon is not running.
        let (code, findings, text) = looked(&root, "/nonexistent/admin.sock");
        assert_eq!(code, Code::Failed, "{check}");
        assert!(told(&findings, check).contains(expected), "{check}, {expected}:\n{text}");
        assert!(told(&findings, "daemon").contains("missing: no daemon responds at /nonexistent/admin.sock"), "{text}");
    }
}

#[test]
fn doctor_checks_driver_iommu_and_memlock_of_vfio_card() {
    let root = host();
    let card = "[[card]]\nname = \"quadro\"\nkind = \"vfio\"\naddress = \"0000:65:00.0\"\n";
    write(&root, "etc/gpu-mediator.toml", card);
    write(&root, "proc/77/comm", "mediatord\n");
    write(&root, "proc/77/limits", "Limit  Soft Limit\nMax locked memory         8388608   8388608   bytes\n");
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert!(told(&findings, "iommu").contains("missing: the kernel does not use an IOMMU"), "{text}");
    assert!(told(&findings, "driver").contains("the host has no NVIDIA PCI function 0000:65:00.0"), "{text}");
    assert!(
        told(&findings, "memlock")
            .contains("missing: the daemon may lock only 8 MiB [add a drop-in with `LimitMEMLOCK=infinity`"),
        "{text}"
    );
    assert!(told(&findings, "daemon").contains("mediatord is running (process 77), but does not serve"), "{text}");
    let fake = Fake::new(&root.path().join("sys"));
    fake.add(Plan::CARD);
    fake.add(Plan { address: "0000:66:00.0", group: Some(8), ..Plan::CARD });
    write(&root, "sys/kernel/iommu_groups/7/type", "");
    write(&root, "proc/77/limits", "Max locked memory         unlimited   unlimited   bytes\n");
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert_eq!((told(&findings, "iommu"), told(&findings, "memlock")), (String::new(), String::new()), "{text}");
    let driver = told(&findings, "driver");
    assert!(
        driver.contains("0000:65:00.0 is bound to driver nouveau, not vfio-pci [`mediatorctl card bind"),
        "{driver}"
    );
    assert!(told(&findings, "cards").contains("note: NVIDIA cards without a [[card]] table: 0000:66:00.0"), "{text}");
}

#[test]
fn a_cuda_card_needs_nvidias_driver_and_the_library() {
    let root = host();
    let card = "[[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = 1024\n";
    write(&root, "etc/gpu-mediator.toml", card);
    qemu(&root, "7.2.0", "");
    let (code, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert_eq!(code, Code::Failed);
    let nvidia = told(&findings, "nvidia");
    for line in ["libcuda.so.1 is missing", "kernel module is not loaded", "nodes: /dev/nvidiactl, /dev/nvidia-uvm"] {
        assert!(nvidia.contains(line), "{nvidia}");
    }
    assert!(told(&findings, "library").contains("/usr/lib/gpu-mediator/cuda/libcuda.so.1 is missing"), "{text}");
    // This host does not need QEMU.
    assert!(told(&findings, "qemu").starts_with("note: "), "{text}");
    for path in ["usr/lib64/libcuda.so.1", "dev/nvidiactl", "dev/nvidia-uvm", "usr/lib/gpu-mediator/cuda/libcuda.so.1"]
    {
        write(&root, path, "");
    }
    // Programs that load the driver under another name would load NVIDIA's driver.
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert!(told(&findings, "library").contains("/usr/lib/gpu-mediator/cuda/libcuda.so is missing"), "{text}");
    for name in ["libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
        write(&root, &format!("usr/lib/gpu-mediator/cuda/{name}"), "");
    }
    write(&root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX  575.57\nGCC\n");
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert_eq!((told(&findings, "nvidia"), told(&findings, "library")), (String::new(), String::new()), "{text}");
    assert!(text.contains("NVRM version: NVIDIA UNIX 575.57"), "{text}");
    // A driver configured by path does not need NVIDIA's device nodes.
    write(&root, "etc/gpu-mediator.toml", &format!("{card}cuda.driver = \"/opt/driver.so\"\n"));
    write(&root, "opt/driver.so", "");
    fs::remove_file(root.path().join("dev/nvidiactl")).unwrap();
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert_eq!(told(&findings, "nvidia"), "", "{text}");
}

#[test]
fn cuda_in_vms_needs_worker_sandbox_rights_and_memory() {
    let root = host();
    let card = "[[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = 1024\nmemory.host_mib = 4096\n";
    let vm = "[[vm]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 64\ncuda = { window_mib = 4096 }\n";
    write(&root, "etc/gpu-mediator.toml", &format!("{card}cuda.worker_users = [900, 963]\n{vm}"));
    write(&root, "sys/kernel/security/lsm", "lockdown,yama,apparmor");
    write(&root, "sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n");
    write(&root, "sys/module/nvidia/version", "580.1\n");
    write(&root, "proc/meminfo", "MemTotal:        1048576 kB\n");
    write(&root, "proc/77/comm", "mediatord\n");
    write(&root, "proc/77/status", "Name:\tmediatord\nCapEff:\t0000000000000020\n");
    fs::create_dir_all(root.path().join("usr/lib64")).unwrap();
    std::os::unix::fs::symlink("libcuda.so.575.57", root.path().join("usr/lib64/libcuda.so.1")).unwrap();
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert!(
        told(&findings, "worker").starts_with("missing: card `h100`: /usr/lib/gpu-mediator/cuda-worker is missing"),
        "{text}"
    );
    let users = told(&findings, "worker-users");
    assert!(users.contains("users 900 to 963: it lacks CAP_SETGID, CAP_SETUID [uncomment the lines"), "{users}");
    // Separate users also protect the host, so Landlock is not required.
    assert!(told(&findings, "sandbox").starts_with("note: the kernel does not support Landlock"), "{text}");
    assert!(told(&findings, "hmm").contains("uvm_disable_hmm=1"), "{text}");
    assert!(told(&findings, "window").starts_with("missing: windows of 4096 MiB in total, with 1024 MiB"), "{text}");
    assert!(
        told(&findings, "versions").contains("library has version 575.57, but its kernel module has version 580.1"),
        "{text}"
    );

    write(&root, "etc/gpu-mediator.toml", &format!("{card}{vm}"));
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert!(told(&findings, "sandbox").starts_with("missing: "), "{text}");
    assert!(told(&findings, "worker-users").starts_with("note: "), "{text}");
    write(&root, "etc/gpu-mediator.toml", &format!("{card}cuda.sandbox = false\n{vm}"));
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert!(told(&findings, "sandbox").contains("remove `cuda.sandbox = false`"), "{text}");

    write(&root, "etc/gpu-mediator.toml", &format!("{card}cuda.worker_users = [900, 963]\n{vm}"));
    write(&root, "sys/kernel/security/lsm", "lockdown,landlock,apparmor\n");
    write(&root, "sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y\n");
    write(&root, "sys/module/nvidia/version", "575.57\n");
    write(&root, "proc/meminfo", "MemTotal:        8388608 kB\n");
    write(&root, "proc/77/status", "Name:\tmediatord\nCapEff:\t00000000000000e0\n");
    write(&root, "usr/lib/gpu-mediator/cuda-worker", "");
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    for check in ["worker", "worker-users", "sandbox", "hmm", "window", "versions"] {
        assert_eq!(told(&findings, check), "", "{text}");
    }
}

#[test]
fn libvirt_needs_its_hook_and_rights() {
    let root = host();
    program(&root, "usr/sbin/libvirtd", "");
    write(&root, "etc/apparmor.d/abstractions/libvirt-qemu", "");
    let vm = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n[[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = 64\n";
    write(&root, "etc/gpu-mediator.toml", vm);
    write(&root, "run/gpu-mediator/x", "");
    let socket = root.path().join("run/gpu-mediator/a.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o600)).unwrap();
    let (_, findings, text) = looked(&root, "/nonexistent/admin.sock");
    assert!(
        told(&findings, "libvirt").contains("note: the hook /etc/libvirt/hooks/qemu.d/gpu-mediator is missing"),
        "{text}"
    );
    assert!(
        told(&findings, "apparmor")
            .contains("note: /etc/apparmor.d/abstractions/libvirt-qemu.d/gpu-mediator is missing"),
        "{text}"
    );
    assert!(
        told(&findings, "rights").contains("the user libvirt-qemu cannot connect to /run/gpu-mediator/a.sock"),
        "{text}"
    );
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    write(&root, "etc/libvirt/hooks/qemu.d/gpu-mediator", "");
    write(&root, "etc/apparmor.d/abstractions/libvirt-qemu.d/gpu-mediator", "");
    let (_, findings, _) = looked(&root, "/nonexistent/admin.sock");
    assert_eq!(
        [told(&findings, "libvirt"), told(&findings, "apparmor"), told(&findings, "rights")],
        [const { String::new() }; 3]
    );
}

#[test]
fn doctor_reads_relative_config_path_from_current_folder() {
    let root = host();
    let here = tempfile::Builder::new().prefix(".doctor-").tempdir_in(".").unwrap();
    let relative = std::path::Path::new(here.path().file_name().unwrap()).join("site.toml");
    fs::write(&relative, "[[card]]\nname = \"mine\"\nkind = \"simgpu\"\n[[vm]]\n").unwrap();
    let (root, relative) = (root.path().display().to_string(), relative.display().to_string());
    let mut out = Vec::new();
    run(["mediatorctl", "doctor", "--root", &root, "--config", &relative, "--json"], &mut out, &mut Vec::new());
    let json: Value = serde_json::from_slice(&out).unwrap();
    let found = told(json["findings"].as_array().unwrap(), "config");
    assert!(found.contains("site.toml has 1 errors") && found.contains("site.toml:4:1: vm[0]"), "{found}");
}
