"""What is served, and how it counts tokens."""


def test_the_one_model_is_listed(client):
    (listed,) = client.get("/v1/models").json()["data"]
    assert (listed["id"], listed["object"], listed["max_model_len"]) == ("tiny", "model", 320)
    assert client.get("/v1/models/tiny").json() == listed
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_tokenize_matches_tokenizer(client, byte_tokenizer):
    found = client.post("/tokenize", json={"prompt": "Grüße"}).json()
    assert found == {"tokens": byte_tokenizer.encode("Grüße").ids, "count": 7, "max_model_len": 320}
    assert client.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    assert client.post("/tokenize", json={"prompt": "x" * 321}).status_code == 400
