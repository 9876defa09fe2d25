//! NBD over TCP with certificates: other people's clients come in with the right ones, in both
//! modes, and nobody comes in with the wrong ones or, where TLS is required, without.

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::clients::{have, run, run_ok};
use hearth_rig::daemon::path;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Output;

const MIB: u64 = 1 << 20;

/// Who signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Result<Authority> {
        let mut params = CertificateParams::new(vec![])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate()?;
        Ok(Authority(CertifiedIssuer::self_signed(params, key)?))
    }

    /// A new certificate and its key in `dir`, as files that begin with `who`.
    fn issue(&self, who: &str, dir: &Path) -> Result<()> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec!["localhost".to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, who);
        let cert = params.signed_by(&key, &self.0)?;
        fs::write(dir.join(format!("{who}-cert.pem")), cert.pem())?;
        fs::write(dir.join(format!("{who}-key.pem")), key.serialize_pem())?;
        Ok(())
    }

    fn publish(&self, dir: &Path) -> Result<()> {
        Ok(fs::write(dir.join("ca-cert.pem"), self.0.pem())?)
    }
}

/// A daemon that serves disk `vm1` over TCP with TLS.
struct Bench {
    hearth: Hearth,
    port: u16,
    origin: PathBuf,
    ours: Authority,
}

impl Bench {
    fn new(mode: &str) -> Result<Bench> {
        let mut hearth = Hearth::with_pool("128M")?;
        let dir = hearth.dir().join("server");
        fs::create_dir(&dir)?;
        let ours = Authority::new("ours")?;
        ours.issue("server", &dir)?;
        ours.publish(&dir)?;
        // Free when asked for, and hardly taken by another at once.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        for arg in ["--nbd-listen", &format!("127.0.0.1:{port}"), "--tls", mode] {
            hearth.serve_args.push(arg.to_owned());
        }
        hearth.serve_args.push("--tls-dir".to_owned());
        hearth.serve_args.push(path(&dir).to_owned());
        hearth.start()?;
        let origin = hearth.origin("o.img", 8 * MIB)?;
        hearth.add("vm1", path(&origin), &[])?;
        Ok(Bench {
            hearth,
            port,
            origin,
            ours,
        })
    }

    /// A client's directory: it trusts `trusts`, and `signed` has signed its own certificate.
    fn client(&self, name: &str, trusts: &Authority, signed: Option<&Authority>) -> Result<String> {
        let dir = self.hearth.dir().join(name);
        fs::create_dir(&dir)?;
        trusts.publish(&dir)?;
        if let Some(authority) = signed {
            authority.issue("client", &dir)?;
        }
        Ok(path(&dir).to_owned())
    }

    fn good(&self) -> Result<String> {
        self.client("good", &self.ours, Some(&self.ours))
    }

    fn plain_uri(&self) -> String {
        format!("nbd://localhost:{}/vm1", self.port)
    }

    fn tls_uri(&self, dir: &str) -> String {
        format!("nbds://localhost:{}/vm1?tls-certificates={dir}", self.port)
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<Output> {
        run(program, args, self.hearth.dir())
    }

    fn size(&self, uri: &str) -> Result<Output> {
        self.run("nbdinfo", &["--size", uri])
    }

    /// The whole disk through TLS, with libnbd, is the origin.
    fn copies_out(&self, dir: &str) -> Result<()> {
        let out = self.hearth.dir().join("out.img");
        let uri = self.tls_uri(dir);
        run_ok("nbdcopy", &[&uri, path(&out)], self.hearth.dir())?;
        ensure!(
            fs::read(&out)? == fs::read(&self.origin)?,
            "other data came through TLS"
        );
        Ok(())
    }

    /// The same with QEMU, which brings a TLS of its own.
    fn qemu_copies_out(&self, dir: &str) -> Result<()> {
        let out = self.hearth.dir().join("qemu.img");
        let creds = format!("tls-creds-x509,id=t,dir={dir},endpoint=client");
        let image = format!(
            "driver=nbd,export=vm1,server.type=inet,server.host=localhost,server.port={},tls-creds=t",
            self.port
        );
        let args = [
            "convert",
            "--object",
            &creds,
            "--image-opts",
            &image,
            "-O",
            "raw",
            path(&out),
        ];
        run_ok("qemu-img", &args, self.hearth.dir())?;
        ensure!(
            fs::read(&out)? == fs::read(&self.origin)?,
            "qemu-img got other data through TLS"
        );
        Ok(())
    }

    /// A client that does not belong here gets nothing, and those that do still come in.
    fn refuses(&self, what: &str, uri: &str) -> Result<()> {
        let out = self.size(uri)?;
        ensure!(
            !out.status.success() && out.stdout.is_empty(),
            "{what} came in: {}",
            String::from_utf8_lossy(&out.stdout)
        );
        Ok(())
    }

    /// No client with wrong certificates comes in, whatever the mode.
    fn refuses_strangers(&self) -> Result<()> {
        let theirs = Authority::new("theirs")?;
        let distrusts = self.client("distrusts", &theirs, Some(&self.ours))?;
        self.refuses(
            "a client that does not know our CA",
            &self.tls_uri(&distrusts),
        )?;
        let stranger = self.client("stranger", &self.ours, Some(&theirs))?;
        self.refuses("a client of another CA", &self.tls_uri(&stranger))?;
        let nobody = self.client("nobody", &self.ours, None)?;
        self.refuses("a client without a certificate", &self.tls_uri(&nobody))
    }
}

fn can_tls(test: &str) -> Result<bool> {
    if !have(test, &["nbdinfo", "nbdcopy", "qemu-img"]) {
        return Ok(false);
    }
    // A libnbd without GnuTLS says so before it connects anywhere.
    let out = run("nbdinfo", &["nbds://localhost:1/x"], Path::new("/"))?;
    let without = String::from_utf8_lossy(&out.stderr).contains("without TLS");
    if without {
        println!("SKIPPED {test}: this nbdinfo was compiled without TLS");
    }
    Ok(!without)
}

#[test]
fn required_lets_in_only_who_has_a_certificate() -> Result<()> {
    if !can_tls("TLS required")? {
        return Ok(());
    }
    let bench = Bench::new("required")?;
    let good = bench.good()?;
    bench.refuses("a client without TLS", &bench.plain_uri())?;
    bench.refuses_strangers()?;
    bench.copies_out(&good)?;
    bench.qemu_copies_out(&good)
}

#[test]
fn allowed_lets_in_with_and_without() -> Result<()> {
    if !can_tls("TLS allowed")? {
        return Ok(());
    }
    let bench = Bench::new("allowed")?;
    let good = bench.good()?;
    for uri in [bench.plain_uri(), bench.tls_uri(&good)] {
        let out = bench.size(&uri)?;
        let size = String::from_utf8_lossy(&out.stdout).trim().parse::<u64>();
        let words = || format!("{uri}: {}", String::from_utf8_lossy(&out.stderr));
        ensure!(size.with_context(words)? == 8 * MIB, "{uri}: another size");
    }
    bench.refuses_strangers()?;
    bench.copies_out(&good)
}

/// What only one program knows of a connection does not go over to the next one: its client is named before.
#[test]
fn an_upgrade_names_who_is_connected_through_tls() -> Result<()> {
    if !have("upgrade with TLS clients", &["qemu-io", "stdbuf"]) {
        return Ok(());
    }
    let bench = Bench::new("required")?;
    let creds = format!("tls-creds-x509,id=t,dir={},endpoint=client", bench.good()?);
    let image = format!(
        "driver=nbd,export=vm1,server.type=inet,server.host=localhost,server.port={},tls-creds=t,reconnect-delay=60",
        bench.port
    );
    // It stays as long as its input is open.
    let mut qemu = std::process::Command::new("qemu-io")
        .args(["--object", &creds, "--image-opts", &image])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()?;
    let input = qemu.stdin.take();
    let outcome = (|| {
        let hearth = &bench.hearth;
        let clients = || -> Option<u64> {
            let disk: serde_json::Value =
                serde_json::from_str(&hearth.ok(&["disk", "show", "vm1", "--json"]).ok()?).ok()?;
            disk["clients"]
                .as_array()?
                .iter()
                .map(|c| c["encrypted"].as_u64())
                .sum()
        };
        hearth_rig::wait::until(
            "qemu-io is connected",
            std::time::Duration::from_secs(60),
            || clients().filter(|n| *n == 1),
        )?;
        let words = hearth.refused(&["upgrade"])?;
        ensure!(
            words.contains("127.0.0.1") || words.contains("::1"),
            "{words}"
        );
        let check = hearth.ok(&["upgrade", "--check", "--json"])?;
        let check: serde_json::Value = serde_json::from_str(&check)?;
        ensure!(check["carried"] == 0, "{check}");
        let why = check["at_risk"][0]["why"].as_str().unwrap_or_default();
        ensure!(why.contains("encrypted"), "{check}");
        let done = hearth.ok(&["upgrade", "--yes", "--json"])?;
        let done: serde_json::Value = serde_json::from_str(&done)?;
        ensure!(done["ended"] == 1 && done["carried"] == 0, "{done}");
        Ok(())
    })();
    drop(input);
    qemu.kill()?;
    qemu.wait()?;
    outcome
}
