//! Real clients against the session. A client that is not installed is skipped, saying so.

use crate::common::*;
use crate::socket::serve;
use hearth_nbd::certs;
use hearth_volume::Status;
use std::process::{Command, Output};

/// Runs a program; `None`, with the reason printed, if it is not installed.
fn run(program: &str, args: &[&str]) -> Option<Output> {
    match Command::new(program).args(args).output() {
        Ok(output) => {
            println!(
                "{program} {args:?}\n{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            Some(output)
        }
        Err(error) => {
            println!("skipped: {program} cannot be run here: {error}");
            None
        }
    }
}

/// Runs a program that must succeed; its standard output.
fn must(program: &str, args: &[&str]) -> Option<String> {
    let output = run(program, args)?;
    assert!(output.status.success(), "{program} failed");
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

const MIB: u64 = 1 << 20;

#[test]
fn nbdinfo_sees_what_is_offered() {
    let disk = Disk::new(3, "vm1", 8 * MIB);
    *disk.extents.lock().unwrap() = vec![(MIB, Status::Data), (7 * MIB, Status::Hole)];
    let server = serve(vec![disk, Disk::new(4, "vm2", MIB)], None);
    let Some(info) = must("nbdinfo", &["--json", &server.uri("vm1")]) else {
        return;
    };
    for word in [
        "\"export-size\": 8388608",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_fast_zero\": true",
        "\"can_trim\": true",
        "\"can_cache\": true",
        "\"can_df\": true",
        "\"block_size_maximum\": 33554432",
        "\"block_size_minimum\": 512",
        "\"base:allocation\"",
        "\"description\": \"disk 3\"",
    ] {
        assert!(info.contains(word), "{word}");
    }
    let list = must("nbdinfo", &["--list", "--json", &server.uri("")]).unwrap_or_default();
    assert!(list.contains("\"vm1\"") && list.contains("\"vm2\""));
    let map = must("nbdinfo", &["--map", &server.uri("vm1")]).unwrap_or_default();
    let lines: Vec<Vec<&str>> = map
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0][..3], ["0", "1048576", "0"]);
    assert_eq!(lines[1][..3], ["1048576", "7340032", "3"]);
    let unknown = run("nbdinfo", &[&server.uri("vm9")]);
    assert!(unknown.is_some_and(|o| !o.status.success()));
}

#[test]
fn nbdcopy_copies_out_and_back() {
    let disk = Disk::new(3, "vm1", 40 * MIB + 512);
    let server = serve(vec![disk.clone()], None);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("image");
    let path = file.to_string_lossy();
    if must("nbdcopy", &[&server.uri("vm1"), &path]).is_none() {
        return;
    }
    assert!(std::fs::read(&file).unwrap() == *disk.data.lock().unwrap());
    let mut other: Vec<u8> = (0..40 * MIB + 512).map(|i| (i / 777) as u8).collect();
    other[MIB as usize..20 * MIB as usize].fill(0);
    std::fs::write(&file, &other).unwrap();
    must("nbdcopy", &["--flush", &path, &server.uri("vm1")]);
    assert!(other == *disk.data.lock().unwrap());
}

#[test]
fn qemu_reads_writes_zeroes_trims_and_flushes() {
    let disk = Disk::new(3, "vm1", 16 * MIB);
    let server = serve(vec![disk.clone()], None);
    let uri = server.uri("vm1");
    let script = [
        "write -P 0xab 1000 70000",
        "read -P 0xab 1000 70000",
        "write -f -P 0xcd 4096 4096",
        "read -P 0xcd 4096 4096",
        "write -z 0 1000",
        "read -P 0 0 1000",
        "write -z -u 65536 65536",
        "read -P 0 65536 65536",
        "write -n -z 0 8M",
        "aio_write -P 1 0 4k",
        "aio_write -P 2 8k 64k",
        "aio_flush",
        "read -P 2 8k 64k",
        "discard 1M 1M",
        "flush",
    ];
    let mut args = vec!["-f", "raw"];
    for line in script {
        args.extend(["-c", line]);
    }
    args.push(&uri);
    let Some(output) = must("qemu-io", &args) else {
        return;
    };
    assert!(
        !output.contains("failed") && !output.contains("error"),
        "{output}"
    );
    let data = disk.data.lock().unwrap();
    assert!(data[..4096].iter().all(|b| *b == 1));
    assert!(data[8192..8192 + 65536].iter().all(|b| *b == 2));
    assert!(data[MIB as usize..2 * MIB as usize].iter().all(|b| *b == 0));
}

#[test]
fn qemu_img_converts_both_ways_and_compares() {
    let disk = Disk::new(3, "vm1", 40 * MIB);
    let server = serve(vec![disk.clone()], None);
    let uri = server.uri("vm1");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("image");
    let path = file.to_string_lossy();
    if must(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &uri, &path],
    )
    .is_none()
    {
        return;
    }
    assert!(std::fs::read(&file).unwrap() == *disk.data.lock().unwrap());
    disk.data.lock().unwrap().fill(9);
    must(
        "qemu-img",
        &["convert", "-n", "-W", "-f", "raw", "-O", "raw", &path, &uri],
    );
    must(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", &path, &uri],
    );
    must("qemu-img", &["info", "-f", "raw", &uri]);
    must("qemu-img", &["map", "-f", "raw", "--output", "json", &uri]);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let disk = Disk::new(3, "vm1", 16 * MIB);
    let server = serve(vec![disk], None);
    let uri = format!("--uri={}", server.uri("vm1"));
    let supported = run("fio", &["--enghelp=nbd"]).is_some_and(|o| o.status.success());
    if !supported {
        println!("skipped: fio is not installed or has no nbd engine");
        return;
    }
    must(
        "fio",
        &[
            "--name=t",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=512-128k",
            "--blockalign=512",
            "--iodepth=32",
            "--size=16m",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--fsync=50",
        ],
    );
}

/// Certificates by the command line, with the names clients expect.
fn certificates(dir: &std::path::Path) -> Option<()> {
    let at = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let (ca_key, ca) = (at("ca-key.pem"), at(certs::CA_CERT));
    let common = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-x509",
        "-days",
        "2",
    ];
    let mut args = vec!["req"];
    args.extend(common);
    args.extend([
        "-subj",
        "/CN=test authority",
        "-keyout",
        &ca_key,
        "-out",
        &ca,
    ]);
    must("openssl", &args)?;
    for (who, alt) in [
        ("server", "subjectAltName=DNS:localhost"),
        ("client", "subjectAltName=DNS:client"),
    ] {
        let (key, cert) = (
            at(&format!("{who}-key.pem")),
            at(&format!("{who}-cert.pem")),
        );
        let subject = format!("/CN={who}");
        let mut args = vec!["req"];
        args.extend(common);
        args.extend([
            "-CA", &ca, "-CAkey", &ca_key, "-subj", &subject, "-addext", alt,
        ]);
        args.extend([
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            &key,
            "-out",
            &cert,
        ]);
        must("openssl", &args)?;
    }
    Some(())
}

#[test]
fn clients_come_through_tls_with_their_certificates() {
    let dir = tempfile::tempdir().unwrap();
    if certificates(dir.path()).is_none() {
        return;
    }
    let disk = Disk::new(3, "vm1", 16 * MIB);
    let config = certs::load(dir.path(), true).unwrap();
    let server = serve(vec![disk.clone()], Some((true, config)));
    let socket = server.socket.to_string_lossy();
    let creds = format!(
        "tls-creds-x509,id=t,dir={},endpoint=client",
        dir.path().display()
    );
    let image = format!(
        "driver=nbd,export=vm1,server.type=unix,server.path={socket},tls-creds=t,tls-hostname=localhost"
    );
    let file = dir.path().join("image");
    let path = file.to_string_lossy();
    let convert = [
        "convert",
        "--object",
        &creds,
        "--image-opts",
        &image,
        "-O",
        "raw",
        &path,
    ];
    if let Some(output) = run("qemu-img", &convert) {
        if String::from_utf8_lossy(&output.stderr).contains("tls-hostname") {
            println!("skipped: this qemu-img does not know tls-hostname");
        } else {
            assert!(output.status.success());
            assert!(std::fs::read(&file).unwrap() == *disk.data.lock().unwrap());
        }
        // Without TLS nothing is to be had.
        let plain = run("qemu-img", &["info", &server.uri("vm1")]);
        assert!(plain.is_some_and(|o| !o.status.success()));
    }
    let uri = format!(
        "nbds+unix://localhost/vm1?socket={socket}&tls-certificates={}",
        dir.path().display()
    );
    if let Some(output) = run("nbdinfo", &["--size", &uri]) {
        if String::from_utf8_lossy(&output.stderr).contains("not supported") {
            println!("skipped: this nbdinfo cannot do TLS");
        } else {
            assert_eq!(
                String::from_utf8_lossy(&output.stdout).trim(),
                (16 * MIB).to_string()
            );
            must("nbdcopy", &[&uri, "null:"]);
        }
    }
}
