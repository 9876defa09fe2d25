//! The handshake byte by byte, as the protocol document has it, however the bytes are cut.

use hearth_nbd_client::{Handshake, HandshakeError, Negotiated};

const GREETING: &str = "4e42444d41474943 49484156454f5054 0003";
const STRUCTURED_OK: &str = "0003e889045565a9 00000008 00000001 00000000";
const STRUCTURED_NO: &str = "0003e889045565a9 00000008 80000001 00000000";
const EXPORT: &str = "0003e889045565a9 00000007 00000003 0000000c 0000 0000000000100000 016d";
const BLOCKS: &str = "0003e889045565a9 00000007 00000003 0000000e 0003 00000200 00001000 00100000";
const ACK: &str = "0003e889045565a9 00000007 00000001 00000000";

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u32> = hex.chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks(2).map(|d| (d[0] * 16 + d[1]) as u8).collect()
}

/// Feeds messages cut into pieces of `step` bytes; the outcome and all that was sent.
fn shake(messages: &[&str], step: usize) -> (Result<Option<Negotiated>, HandshakeError>, Vec<u8>) {
    let mut handshake = Handshake::new("vm1");
    let mut sent = Vec::new();
    for piece in bytes(&messages.concat()).chunks(step) {
        let outcome = handshake.feed(piece);
        sent.extend(handshake.take_output());
        match outcome {
            Ok(None) => {}
            other => return (other, sent),
        }
    }
    (Ok(None), sent)
}

fn fails(messages: &[&str]) -> HandshakeError {
    shake(messages, 7).0.unwrap_err()
}

#[test]
fn the_usual_way() {
    for step in [1, 3, 18, 1000] {
        let (agreed, sent) = shake(&[GREETING, STRUCTURED_OK, EXPORT, BLOCKS, ACK], step);
        let want = Negotiated {
            size: 1 << 20,
            flags: 0x16d,
            structured: true,
            min_block: 512,
            max_payload: 1 << 20,
        };
        assert_eq!(agreed, Ok(Some(want)));
        let client = "00000003 \
            49484156454f5054 00000008 00000000 \
            49484156454f5054 00000007 0000000b 00000003 766d31 0001 0003";
        assert_eq!(sent, bytes(client));
    }
}

#[test]
fn servers_that_can_less() {
    let (agreed, _) = shake(&[GREETING, STRUCTURED_NO, EXPORT, ACK], 5);
    let agreed = agreed.unwrap().unwrap();
    assert!(!agreed.structured);
    assert_eq!((agreed.min_block, agreed.max_payload), (1, 32 << 20));
    // GO is unknown: the old way, without an answer of its own.
    let go_unknown = "0003e889045565a9 00000007 80000001 00000000";
    let old = "0000000000100000 0001";
    let (agreed, sent) = shake(&[GREETING, STRUCTURED_NO, go_unknown, old], 4);
    assert_eq!(agreed.unwrap().unwrap().size, 1 << 20);
    assert!(sent.ends_with(&bytes("49484156454f5054 00000001 00000003 766d31")));
}

#[test]
fn refusals_say_why() {
    let reply = |kind: &str, text: &str| {
        let hex: String = text.bytes().map(|b| format!("{b:02x}")).collect();
        format!("0003e889045565a9 00000007 {kind} {:08x} {hex}", text.len())
    };
    let no_export = reply("80000006", "go away");
    let error = fails(&[GREETING, STRUCTURED_OK, &no_export]).to_string();
    assert!(
        error.contains("vm1") && error.contains("go away"),
        "{error}"
    );
    assert_eq!(
        fails(&[GREETING, STRUCTURED_OK, &reply("80000005", "")]),
        HandshakeError::Tls
    );
    assert!(matches!(
        fails(&[GREETING, STRUCTURED_OK, &reply("80000002", "")]),
        HandshakeError::Refused { .. }
    ));
    assert_eq!(fails(&["48545450"]), HandshakeError::NotNbd);
    // Oldstyle.
    assert_eq!(
        fails(&["4e42444d41474943 0000420281861253 0000"]),
        HandshakeError::NotNbd
    );
}

#[test]
fn what_cannot_be_is_refused() {
    let block = |min: &str| {
        format!("0003e889045565a9 00000007 00000003 0000000e 0003 {min} 00001000 02000000")
    };
    for (min, want) in [("00002000", 8192), ("00000003", 3), ("00000000", 0)] {
        assert_eq!(
            fails(&[GREETING, STRUCTURED_OK, EXPORT, &block(min), ACK]),
            HandshakeError::Block(want)
        );
    }
    let odd = "0003e889045565a9 00000007 00000003 0000000c 0000 0000000000100001 016d";
    assert!(matches!(
        fails(&[GREETING, STRUCTURED_OK, odd, BLOCKS, ACK]),
        HandshakeError::Size { .. }
    ));
    let endless = STRUCTURED_OK.replace("00000001 00000000", "00000001 7fffffff");
    let unasked = STRUCTURED_OK.replace("00000008", "00000003");
    let no_size = [GREETING, STRUCTURED_OK, ACK];
    let many: Vec<&str> = [GREETING, STRUCTURED_OK]
        .into_iter()
        .chain([EXPORT; 100])
        .collect();
    let chatty = [GREETING, STRUCTURED_OK, EXPORT, ACK, "00"].concat();
    let cut: Vec<Vec<&str>> = vec![
        vec![GREETING, &endless],
        vec![GREETING, &unasked],
        no_size.to_vec(),
        many,
        vec![GREETING, STRUCTURED_OK, EXPORT, "00", ACK],
    ];
    for messages in cut {
        assert!(
            matches!(fails(&messages), HandshakeError::Protocol(_)),
            "{messages:?}"
        );
    }
    let whole = bytes(&chatty);
    let mut handshake = Handshake::new("vm1");
    assert!(matches!(
        handshake.feed(&whole),
        Err(HandshakeError::Protocol(_))
    ));
}
