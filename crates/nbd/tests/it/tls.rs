//! The session inside TLS, against a rustls client in memory.

use crate::common;
use crate::common::*;
use hearth_nbd::tls::TlsSession;
use hearth_nbd::{NbdSession, TlsMode, certs};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{PrivateKeyDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "test authority");
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Certificate and key, PEM.
    fn issue(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, format!("cn of {name}"));
        (
            params.signed_by(&key, &self.0).unwrap().pem(),
            key.serialize_pem(),
        )
    }

    fn server_dir(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = self.issue("localhost");
        std::fs::write(dir.path().join(certs::SERVER_CERT), cert).unwrap();
        std::fs::write(dir.path().join(certs::SERVER_KEY), key).unwrap();
        std::fs::write(dir.path().join(certs::CA_CERT), self.0.pem()).unwrap();
        dir
    }

    fn client(&self, with_cert: Option<&Authority>) -> ClientConnection {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match with_cert {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let (cert, key) = authority.issue("client");
                let chain = vec![
                    rustls::pki_types::CertificateDer::from_pem_slice(cert.as_bytes()).unwrap(),
                ];
                builder
                    .with_client_auth_cert(
                        chain,
                        PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
                    )
                    .unwrap()
            }
        };
        ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap()
    }
}

fn server(config: Arc<ServerConfig>, mode: TlsMode) -> Wire {
    let disk = Disk::new(3, "vm1", SIZE);
    let inner = NbdSession::new(common::server(vec![disk.clone()]), mode, "test".into());
    Wire::over(Box::new(TlsSession::new(inner, config)), disk)
}

/// A client inside TLS: plaintext in, plaintext out.
struct Tunnel {
    wire: Wire,
    tls: ClientConnection,
    got: Vec<u8>,
    step: usize,
}

impl Tunnel {
    fn start(mut wire: Wire, tls: ClientConnection) -> Tunnel {
        wire.greet(3);
        assert_eq!(wire.verdict(5, &[]), 1);
        let mut tunnel = Tunnel {
            wire,
            tls,
            got: Vec::new(),
            step: usize::MAX,
        };
        tunnel.exchange().unwrap();
        tunnel
    }

    /// Moves ciphertext both ways until nothing moves.
    fn exchange(&mut self) -> Result<(), rustls::Error> {
        loop {
            let mut out = Vec::new();
            while self.tls.wants_write() {
                self.tls.write_tls(&mut out).unwrap();
            }
            let step = self.step;
            self.wire.feed_in(&out, || step);
            self.wire.settle();
            let cipher: Vec<u8> = self.wire.got.drain(..).collect();
            if cipher.is_empty() && out.is_empty() {
                return Ok(());
            }
            let mut rest = &cipher[..];
            while !rest.is_empty() {
                self.tls.read_tls(&mut rest).unwrap();
                self.tls.process_new_packets()?;
                let mut plain = [0; 65536];
                while let Ok(n @ 1..) = self.tls.reader().read(&mut plain) {
                    self.got.extend(&plain[..n]);
                }
            }
        }
    }

    fn say(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let n = self.tls.writer().write(bytes).unwrap();
            bytes = &bytes[n..];
            self.exchange().unwrap();
        }
    }
}

#[test]
fn requests_pass_through_tls_whole_and_in_pieces() {
    let authority = Authority::new();
    let dir = authority.server_dir();
    let config = certs::load(dir.path(), false).unwrap();
    for (mode, step, send_step) in [
        (TlsMode::Allowed, usize::MAX, usize::MAX),
        (TlsMode::Required, 1000, 700),
        (TlsMode::Required, 7, 3),
    ] {
        let mut wire = server(config.clone(), mode);
        wire.send_step = send_step;
        let mut tunnel = Tunnel::start(wire, authority.client(None));
        tunnel.step = step;
        tunnel.say(&option_bytes(5, &[]));
        assert_eq!(
            tunnel.got[12..16],
            0x8000_0003u32.to_be_bytes(),
            "TLS is up already"
        );
        tunnel.got.clear();
        tunnel.say(&option_bytes(7, &go("vm1", &[])));
        tunnel.got.clear();
        let payload: Vec<u8> = (0..300_000).map(|i| (i * 13) as u8).collect();
        tunnel.say(&Req::write(1000, payload.clone()).bytes(Style::Simple));
        assert_eq!(tunnel.got.len(), 16);
        tunnel.got.clear();
        tunnel.say(&Req::new(0, 1000, 300_000).bytes(Style::Simple));
        assert!(tunnel.got[16..] == payload);
        tunnel.got.clear();
        tunnel.say(&Req::new(2, 0, 0).bytes(Style::Simple));
        assert!(tunnel.wire.session.closing());
        assert!(tunnel.got.is_empty());
        // The server said goodbye inside TLS.
        let mut byte = [0];
        assert_eq!(tunnel.tls.reader().read(&mut byte).unwrap(), 0);
    }
}

#[test]
fn many_requests_wait_their_turn_inside_tls() {
    let authority = Authority::new();
    let dir = authority.server_dir();
    let config = certs::load(dir.path(), false).unwrap();
    let mut tunnel = Tunnel::start(server(config, TlsMode::Required), authority.client(None));
    tunnel.say(&option_bytes(7, &go("vm1", &[])));
    tunnel.got.clear();
    tunnel.wire.hold = true;
    let flush = Req::new(3, 0, 0).bytes(Style::Simple);
    tunnel.tls.set_buffer_limit(None);
    tunnel.tls.writer().write_all(&flush.repeat(3000)).unwrap();
    let mut out = Vec::new();
    while tunnel.tls.wants_write() {
        tunnel.tls.write_tls(&mut out).unwrap();
    }
    let mut delivered = 0;
    while tunnel.got.len() < 3000 * 16 {
        delivered += tunnel.wire.feed_in(&out[delivered..], || usize::MAX);
        assert!(tunnel.wire.session.in_flight() <= hearth_nbd::REQUESTS_MAX);
        let request = tunnel
            .wire
            .held
            .pop_front()
            .expect("a request waits, or all are answered");
        tunnel.wire.complete(request);
        tunnel.wire.settle();
        tunnel.exchange().unwrap();
    }
    assert_eq!(delivered, out.len());
}

#[test]
fn tls_forgets_what_was_agreed_in_the_clear() {
    let authority = Authority::new();
    let dir = authority.server_dir();
    let config = certs::load(dir.path(), false).unwrap();
    let mut wire = server(config, TlsMode::Allowed);
    wire.greet(3);
    assert_eq!(wire.verdict(8, &[]), 1);
    assert_eq!(wire.verdict(5, &[]), 1);
    let mut tunnel = Tunnel {
        wire,
        tls: authority.client(None),
        got: Vec::new(),
        step: usize::MAX,
    };
    tunnel.exchange().unwrap();
    tunnel.say(&option_bytes(7, &go("vm1", &[])));
    tunnel.got.clear();
    tunnel.say(&Req::new(0, 0, 10).bytes(Style::Simple));
    assert_eq!(
        tunnel.got[..4],
        0x67446698u32.to_be_bytes(),
        "a simple reply"
    );
}

#[test]
fn client_certificates_are_checked_if_asked_for() {
    let authority = Authority::new();
    let dir = authority.server_dir();
    let config = certs::load(dir.path(), true).unwrap();
    let stranger = Authority::new();
    for (cert, welcome) in [
        (None, false),
        (Some(&authority), true),
        (Some(&stranger), false),
    ] {
        let mut wire = server(config.clone(), TlsMode::Required);
        wire.greet(3);
        assert_eq!(wire.verdict(5, &[]), 1);
        let mut tunnel = Tunnel {
            wire,
            tls: authority.client(cert),
            got: Vec::new(),
            step: usize::MAX,
        };
        let result = tunnel.exchange();
        assert_eq!(result.is_ok(), welcome);
        assert_eq!(tunnel.wire.session.closing(), !welcome);
        if welcome {
            // The export learns who comes.
            tunnel.say(&option_bytes(7, &go("vm1", &[])));
            let caller = tunnel.wire.disk.caller.lock().unwrap().clone();
            assert_eq!(caller.as_deref(), Some("cn of client"));
        }
    }
}

#[test]
fn garbage_instead_of_tls_ends_it() {
    let authority = Authority::new();
    let dir = authority.server_dir();
    let config = certs::load(dir.path(), false).unwrap();
    let mut wire = server(config, TlsMode::Allowed);
    wire.greet(3);
    assert_eq!(wire.verdict(5, &[]), 1);
    wire.feed_in(&option_bytes(7, &go("vm1", &[])).repeat(1000), || {
        usize::MAX
    });
    assert!(wire.session.closing());
}

#[test]
fn unusable_files_are_named() {
    let authority = Authority::new();
    let message = |dir: &Path, verify| {
        certs::load(dir, verify)
            .err()
            .map(|e| e.to_string())
            .unwrap_or_default()
    };
    let dir = authority.server_dir();
    std::fs::remove_file(dir.path().join(certs::CA_CERT)).unwrap();
    assert!(message(dir.path(), true).contains("ca-cert.pem"));
    assert_eq!(message(dir.path(), false), "");
    std::fs::write(
        dir.path().join(certs::SERVER_KEY),
        authority.issue("other").1,
    )
    .unwrap();
    assert!(message(dir.path(), false).contains("cannot be used together"));
    std::fs::write(dir.path().join(certs::SERVER_KEY), "no key").unwrap();
    assert!(message(dir.path(), false).contains("server-key.pem"));
    std::fs::write(dir.path().join(certs::SERVER_CERT), "").unwrap();
    assert!(message(dir.path(), false).contains("holds no certificate"));
    std::fs::remove_file(dir.path().join(certs::SERVER_CERT)).unwrap();
    assert!(message(dir.path(), false).contains("server-cert.pem"));
}
